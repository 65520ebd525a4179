"""All heads over padded, padding-free and packed batches: one answer, whatever the arrangement."""

import itertools

import pytest
import torch
from tiny import (
    HEADS,
    POSITIONS,
    SIDES,
    TRUNK_AND_HEADS,
    WINDOWS,
    build,
    for_head,
    gradients,
    labels_for,
    tiny_config,
    token_batch,
)
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import DataCollatorWithFlattening

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
POOLINGS = dict(zip(WINDOWS, ("mean", "max", "cls"), strict=True))


def logits_of(name, output):
    if name == "question":
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.last_hidden_state if name == "trunk" else output.logits


def outcome(model, name, inputs, train=False):
    """Logits where they are kept (masked LM keeps none while training), loss and every gradient."""
    model.zero_grad()
    output = model.train(train)(**inputs)
    output.loss.backward()
    is_dropped = train and name == "masked_lm" and model.config.sparse_prediction
    logits = output.loss.new_zeros(0) if is_dropped else logits_of(name, output).detach()
    return logits, output.loss.detach(), gradients(model)


def assert_same_outcome(found, expected, where, tolerance=1e-5):
    """Near to each other, measured against the largest entry of each tensor where that is above 1."""
    (logits, loss, grads), (expected_logits, expected_loss, expected_grads) = found, expected
    pairs = {"logits": (logits, expected_logits), "loss": (loss, expected_loss)}
    pairs |= {name: (grads[name], expected_grads[name]) for name in expected_grads}
    for name, (value, wanted) in pairs.items():
        assert value.shape == wanted.shape, (where, name)
        # Question answering has the dtype's lowest number where no answer can be.
        lowest = torch.finfo(wanted.dtype).min
        assert torch.equal(value == lowest, wanted == lowest), (where, name)
        value, wanted = value.masked_fill(value == lowest, 0.0).float(), wanted.masked_fill(wanted == lowest, 0.0)
        largest = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
        assert_close(
            value, wanted.float(), atol=tolerance * largest, rtol=0, msg=lambda text, at=(where, name): f"{at}: {text}"
        )


# Padding-free equals padded

UNEVEN = (9, 4, 0, 7, 1, 4)


def batch_of(name, side, lengths, extra=0):
    input_ids, mask = token_batch(side, lengths=lengths)
    around = (extra, 0) if side == "left" else (0, extra)
    input_ids, mask = F.pad(input_ids, around), F.pad(mask, around)
    return for_head(name, input_ids, mask) | labels_for(name, input_ids, mask)


def pair_of(name, scheme, window, **fields):
    fields |= {"position_embedding_type": scheme, "classifier_pooling": POOLINGS[window], **WINDOWS[window]}
    return [build(HEADS[name], tiny_config(padding_free=free, **fields)) for free in (True, False)]


@pytest.mark.parametrize("scheme", POSITIONS)
@pytest.mark.parametrize("name", HEADS)
def test_padding_free_equals_padded_with_every_head(name, scheme):
    """Logits, losses and every gradient; rows of no and of one token, one row only, all rows of one length."""
    for window, train in zip(WINDOWS, (True, False, True), strict=True):
        free, padded = pair_of(name, scheme, window)
        batches = [(side, UNEVEN, 0) for side in SIDES] + [("left", (5,), 2), ("right", (5, 5, 5), 2)]
        for side, lengths, extra in batches:
            inputs = batch_of(name, side, lengths, extra)
            found, expected = (outcome(model, name, inputs, train) for model in (free, padded))
            assert_same_outcome(found, expected, (window, side, lengths))


@pytest.mark.parametrize("scheme", POSITIONS)
@pytest.mark.parametrize("name", HEADS)
def test_padding_free_equals_padded_in_half_precision(name, scheme):
    for window, side in zip(WINDOWS, SIDES, strict=True):
        inputs = batch_of(name, side, UNEVEN)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (outcome(model, name, inputs) for model in pair_of(name, scheme, window))
        assert_same_outcome(found, expected, (window, side), tolerance=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", POSITIONS)
@pytest.mark.parametrize("name", HEADS)
def test_padding_free_equals_padded_over_the_whole_grid(name, scheme):
    lengths = ((0, 1), (1,), (1, 1, 1), (9, 4, 7), (20, 3, 20, 1, 0), (6,))
    for window, pooling in itertools.product(WINDOWS, ("cls", "mean", "max")):
        free, padded = pair_of(name, scheme, window)
        for model in (free, padded):
            if hasattr(model, "pooler"):
                model.pooler.pooling = pooling
        for side, rows, extra, train in itertools.product(SIDES, lengths, (0, 3), (False, True)):
            inputs = batch_of(name, side, rows, extra)
            found, expected = (outcome(model, name, inputs, train) for model in (free, padded))
            assert_same_outcome(found, expected, (window, pooling, side, rows, extra, train))


@pytest.mark.parametrize("name", ["masked_lm", "token"])
@pytest.mark.parametrize("train", [True, False])
def test_padding_has_zero_logits_and_no_item(name, train):
    """A collator may pad labels with a class number: padding is not computed, in either arrangement."""
    for free in (True, False):
        model = build(HEADS[name], tiny_config(padding_free=free, sparse_prediction=False))
        input_ids, mask = token_batch("holes")
        labels = labels_for(name, input_ids, mask)["labels"]
        expected = outcome(model, name, {"input_ids": input_ids, "attention_mask": mask, "labels": labels}, train)
        for dtype in (torch.long, torch.float32):
            filled = labels.masked_fill(mask == 0, 1).to(dtype)
            found = outcome(model, name, {"input_ids": input_ids, "attention_mask": mask, "labels": filled}, train)
            assert_same_outcome(found, expected, (free, dtype))
        assert (found[0][mask == 0] == 0).all()
        unsigned = labels.clamp(min=0).to(torch.uint8)
        model(input_ids, attention_mask=mask, labels=unsigned).loss.backward()


# Hidden states


@pytest.mark.parametrize("scheme", POSITIONS)
@pytest.mark.parametrize("name", TRUNK_AND_HEADS)
def test_hidden_states_keep_the_shape_of_the_batch(name, scheme):
    """Case 11: all of them, with the values that the padding-free run has on the way."""
    for window, side in zip(WINDOWS, SIDES, strict=True):
        config = tiny_config(position_embedding_type=scheme, **WINDOWS[window])
        model = build(TRUNK_AND_HEADS[name], config)
        trunk = model if name == "trunk" else model.model
        inputs = for_head(name, *token_batch(side))
        flat = {key: value.flatten(0, -2) for key, value in inputs.items()}
        with torch.no_grad():
            found = model(**inputs, output_hidden_states=True)
            on_the_way = []
            hooks = [
                layer.register_forward_pre_hook(lambda module, given, seen=on_the_way: seen.append(given[0]))
                for layer in trunk.layers
            ]
            logits = logits_of(name, model(**inputs))
            for hook in hooks:
                hook.remove()
            last = trunk(**flat).last_hidden_state
        layout, real = trunk.layout(**flat), flat["attention_mask"].bool()
        assert [state.shape for state in found.hidden_states] == [(*real.shape, 32)] * 3
        assert_close(found.hidden_states[-1], last, **CLOSE)
        assert_close(logits_of(name, found), logits, **CLOSE)
        for state, seen in zip(found.hidden_states[:-1], on_the_way, strict=True):
            assert seen.shape == (int(real.sum()), 32)
            assert_close(state[real], layout.restore(seen)[real], **CLOSE)


# Packed rows

LENGTHS = (5, 9, 1, 5)


def pack(name, inputs, mask):
    """The same texts and labels end to end in one row, and every way to say where they begin."""
    if name == "choice":  # row c: choice c of every example
        rows = [
            pack("trunk", {"input_ids": ids}, m)
            for ids, m in zip(inputs["input_ids"].unbind(1), mask.unbind(1), strict=True)
        ]
        packed = {"input_ids": torch.stack([row["input_ids"] for row, _ in rows], dim=1), "labels": inputs["labels"]}
        restart = torch.stack([marks["restart"]["position_ids"] for _, marks in rows], dim=1)
        total = int(rows[0][1]["lengths"]["cu_seq_lens_q"][-1])
        edges = [marks["lengths"]["cu_seq_lens_q"][:-1] + total * row for row, (_, marks) in enumerate(rows)]
        edges = torch.cat([*edges, torch.tensor([2 * total], dtype=torch.int32)])
        return packed, {"restart": {"position_ids": restart}, "lengths": {"cu_seq_lens_q": edges}}
    lengths, mask = mask.sum(dim=1).tolist(), mask.bool()
    by_token = {"trunk": ("input_ids",), "token": ("input_ids", "labels"), "masked_lm": ("input_ids", "labels")}
    by_token = by_token.get(name, ("input_ids",))
    packed = {key: value[mask][None] if key in by_token else value for key, value in inputs.items()}
    packed.pop("attention_mask", None)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    restart = torch.cat([torch.arange(length) for length in lengths])[None]
    lens = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return packed, {"restart": {"position_ids": restart}, "lengths": lens}


@pytest.mark.parametrize("scheme", POSITIONS)
@pytest.mark.parametrize("name", HEADS)
def test_packed_rows_give_what_the_padded_batch_gives(name, scheme):
    """Cases 6, 7 and 8: logits of each sequence, loss and every gradient, in both arrangements."""
    input_ids, mask = token_batch("right", lengths=LENGTHS)
    labels = labels_for(name, input_ids, mask)
    inputs = for_head(name, input_ids, mask) | labels
    packed, marks = pack(name, inputs, inputs["attention_mask"])
    ones = torch.ones_like(packed["input_ids"])
    for window in WINDOWS:
        models = pair_of(name, scheme, window, position_offset=2)
        logits, loss, grads = outcome(models[1], name, inputs)
        if name in ("token", "masked_lm"):
            logits = logits[mask.bool()][None]
        for model, (mark, extra), seen in itertools.product(models, marks.items(), (None, ones)):
            if window != "sliding" and (mark == "lengths") == (seen is None):
                continue  # half of the combinations will do
            given = {**packed, **extra, "attention_mask": seen}
            found = outcome(model, name, given)
            where = (window, model.config.padding_free, mark, seen is not None)
            assert_same_outcome(found, (logits, loss, grads), where)


@pytest.mark.parametrize("name", HEADS)
def test_packed_rows_in_other_arrangements(name):
    """Weights and hidden states, on request, need a rectangle: the rows of the heads stay those of the sequences."""
    input_ids, mask = token_batch("right", lengths=LENGTHS)
    inputs = for_head(name, input_ids, mask) | labels_for(name, input_ids, mask)
    packed, marks = pack(name, inputs, inputs["attention_mask"])
    model = build(HEADS[name], tiny_config())
    expected = outcome(model, name, {**packed, **marks["restart"]})
    ids = packed["input_ids"]
    total = ids.shape[-1]
    pairs = torch.ones(ids[..., 0].numel(), total, total, dtype=torch.bool).view(*ids.shape[:-1], total, total)
    for more in ({"output_attentions": True}, {"output_hidden_states": True}, {"attention_mask": pairs}):
        found = outcome(model, name, {**packed, **marks["restart"], **more})
        assert_same_outcome(found, expected, tuple(more))


@pytest.mark.parametrize("name", ["masked_lm", "sequence", "token", "question"])
def test_batches_of_the_flattening_collator_of_transformers(name):
    input_ids, mask = token_batch("right", lengths=LENGTHS)
    features = [{"input_ids": ids[: int(n)].tolist()} for ids, n in zip(input_ids, mask.sum(1), strict=True)]
    model = build(HEADS[name], tiny_config())
    with torch.no_grad():
        expected = logits_of(name, model(input_ids, attention_mask=mask))
    expected = expected if name in ("sequence", "question") else expected[mask.bool()][None]
    options = {"return_flash_attn_kwargs": True, "return_seq_idx": True}
    for more in ({}, options, {**options, "return_position_ids": False}):
        batch = DataCollatorWithFlattening(**more)(features)
        del batch["labels"]
        with torch.no_grad():
            assert_close(logits_of(name, model(**batch)), expected, **CLOSE)


@pytest.mark.parametrize("free", [True, False])
def test_several_packed_rows_with_padding(free):
    """Sequences in the order of the batch; padding, whose positions restart at 0 too, is no sequence."""
    lengths = (5, 4, 2, 3, 6)
    input_ids, mask = token_batch("right", lengths=lengths)
    texts = [ids[: int(n)] for ids, n in zip(input_ids, mask.sum(1), strict=True)]
    rows = (texts[:2], texts[2:3], [], texts[3:])
    batch, positions, seen = (torch.zeros(4, 11, dtype=torch.long) for _ in range(3))
    for row, packed in enumerate(rows):
        place = 0 if row else 1  # the first row is padded left
        for tokens in packed:
            end = place + len(tokens)
            batch[row, place:end], seen[row, place:end] = tokens, 1
            positions[row, place:end] = torch.arange(len(tokens))
            place = end
    for pooling in ("cls", "mean", "max"):
        model = build(HEADS["sequence"], tiny_config(padding_free=free, classifier_pooling=pooling))
        with torch.no_grad():
            found = model(batch, attention_mask=seen, position_ids=positions).logits
            alone = torch.cat([model(tokens[None]).logits for tokens in texts])
            empty = model(batch[2:3], attention_mask=seen[2:3]).logits
        assert_close(found, torch.cat([alone[:3], empty, alone[3:]]), **CLOSE)
    model = build(HEADS["question"], tiny_config(padding_free=free))
    with torch.no_grad():
        found = model(batch, attention_mask=seen, position_ids=positions).start_logits
        alone = model(input_ids, attention_mask=mask).start_logits
    assert found.shape == (6, 6)
    assert_close(found[[0, 1, 2, 4, 5]], alone, **CLOSE)
    assert (found[3] == torch.finfo(found.dtype).min).all()


@pytest.mark.parametrize("free", [True, False])
def test_a_packed_sequence_without_a_real_token_is_padding(free):
    input_ids = token_batch(lengths=(9,))[0]
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 0]])
    edges = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    model = build(HEADS["sequence"], tiny_config(padding_free=free))
    found = model(input_ids, attention_mask=mask, cu_seq_lens_q=edges).logits
    alone = [model(input_ids[:, part]).logits for part in (slice(0, 3), slice(5, 8))]
    assert_close(found, torch.cat(alone), **CLOSE)


@pytest.mark.parametrize("free", [True, False])
def test_a_hidden_first_token_still_begins_its_sequence(free):
    input_ids = token_batch(lengths=(9,))[0]
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    model = build(HEADS["sequence"], tiny_config(padding_free=free, position_embedding_type="none"))
    found = model(input_ids, attention_mask=mask, position_ids=positions).logits
    alone = [model(input_ids[:, part]).logits for part in (slice(0, 4), slice(5, 9))]
    assert_close(found, torch.cat(alone), **CLOSE)


@pytest.mark.parametrize("free", [True, False])
def test_positions_of_padded_rows_are_no_packed_sequences(free):
    """Numbered by the caller, with zeros on padding, rows stay rows and places stay columns."""
    for name, side in itertools.product(("sequence", "question"), SIDES):
        input_ids, mask = token_batch(side)
        model = build(HEADS[name], tiny_config(padding_free=free))
        positions = (mask.cumsum(1) - 1) * mask
        with torch.no_grad():
            expected = logits_of(name, model(input_ids, attention_mask=mask))
            found = logits_of(name, model(input_ids, attention_mask=mask, position_ids=positions))
        assert_close(found, expected, **CLOSE)


def test_choices_packed_unevenly_are_refused():
    model = build(HEADS["choice"], tiny_config())
    input_ids = token_batch(lengths=(6, 6))[0][None]
    positions = torch.tensor([[[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 0, 1]]])
    with pytest.raises(ValueError, match=r"pack \[2, 3\] sequences.*same number"):
        model(input_ids, position_ids=positions)


def test_labels_must_be_one_a_sequence():
    input_ids = token_batch(lengths=(9,))[0]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match=r"labels has shape \(1,\), but there are 2 sequences"):
        build(HEADS["sequence"], tiny_config())(input_ids, position_ids=positions, labels=torch.tensor([1]))
    places = {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([1])}
    with pytest.raises(ValueError, match=r"start_positions and end_positions has shape \(1,\).*\(2,\).*packed"):
        build(HEADS["question"], tiny_config())(input_ids, position_ids=positions, **places)


@pytest.mark.parametrize(
    ("edges", "rule"),
    [
        ([1, 5, 9], "begin with 0 and end with 9"),
        ([0, 5], "begin with 0 and end with 9"),
        ([0, 5, 12], "begin with 0 and end with 9"),
        ([], "begin with 0"),
        ([0, 5, 5, 9], "grow from each to the next"),
        ([0, 6, 5, 9], "grow from each to the next"),
        ([[0, 9]], "begin with 0"),
    ],
)
def test_cumulative_lengths_that_do_not_fit_are_refused(edges, rule):
    for name in ("trunk", "sequence"):
        model = build(TRUNK_AND_HEADS[name], tiny_config())
        edges = torch.as_tensor(edges, dtype=torch.int32)
        with pytest.raises(ValueError, match=rf"cu_seq_lens_q=\[.*must {rule}.*pass \[0, l1.*position_ids"):
            model(token_batch(lengths=(9,))[0], cu_seq_lens_q=edges)


def test_packed_sequences_do_not_go_on_in_the_next_row():
    model = build(TRUNK_AND_HEADS["trunk"], tiny_config())
    input_ids = token_batch(lengths=(9, 9))[0]
    with pytest.raises(ValueError, match=r"cu_seq_lens_q=\[0, 5, 18\] must hold the start of each row.*of 9"):
        model(input_ids, cu_seq_lens_q=torch.tensor([0, 5, 18]))


@pytest.mark.filterwarnings("ignore")
def test_traced_heads_give_one_row_a_row_of_the_batch():
    """The shapes of a graph must not follow the positions that it is given."""
    model = build(HEADS["sequence"], tiny_config())
    model.config.return_dict = False
    input_ids = token_batch(lengths=(9, 9))[0]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    example = {"input_ids": input_ids, "position_ids": positions}
    traced = torch.jit.trace(model, example_kwarg_inputs=example, check_trace=False)
    assert traced(**example)[0].shape == (2, 3)
    with torch.no_grad():
        assert_close(traced(**example)[0][0], model(**example)[0][0], **CLOSE)


def test_cumulative_lengths_are_whole_numbers():
    model = build(HEADS["sequence"], tiny_config())
    with pytest.raises(ValueError, match="must be whole numbers, got torch"):
        model(token_batch()[0][:1], cu_seq_lens_q=torch.tensor([0, 4.5, 9]))
