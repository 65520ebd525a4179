"""The five heads: losses, labels, pooling, loading and saving, precision, and what Trainer sees of them."""

import copy
import itertools
import math

import pytest
import reference
import torch
from tiny import (
    HEADS,
    NO_DROPOUT,
    POSITIONS,
    SIDES,
    TRUNK_AND_HEADS,
    WINDOWS,
    build,
    config_grid,
    for_head,
    gradients,
    labels_for,
    tiny_config,
    token_batch,
)
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.activations import ACT2FN

from modeling_dsx_encoder import (
    DsxEncoderForMaskedLM,
    DsxEncoderForQuestionAnswering,
    DsxEncoderForSequenceClassification,
    DsxEncoderForTokenClassification,
    DsxEncoderModel,
    DsxEncoderPreTrainedModel,
)
from modeling_dsx_encoder import modeling_dsx_encoder as modeling

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
AUTO = {
    "trunk": AutoModel,
    "masked_lm": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "question": AutoModelForQuestionAnswering,
    "choice": AutoModelForMultipleChoice,
}
POOLINGS = ("cls", "mean", "max", "late")
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def logits_of(name, output):
    """All scores of a head in one tensor; question answering has two."""
    if name == "question":
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.last_hidden_state if name == "trunk" else output.logits


def double_state(model):
    return {key: value.double() for key, value in model.state_dict().items()}


# Forward


def test_names_are_the_checkpoint_keys():
    def names(model):
        return {name for name, _ in model.named_parameters()}

    trunk = names(
        DsxEncoderModel(tiny_config(position_embedding_type="learned", embedding_norm=True, type_vocab_size=2))
    )
    assert trunk >= {
        "embeddings.word_embeddings.weight",
        "embeddings.token_type_embeddings.weight",
        "embeddings.norm.weight",
        "positions.table.weight",
        "layers.1.attention_norm.weight",
        "layers.1.attention.qkv_proj.weight",
        "layers.1.attention.out_proj.weight",
        "layers.1.mlp_norm.weight",
        "layers.1.mlp.gate_proj.weight",
        "layers.1.mlp.up_proj.weight",
        "layers.1.mlp.down_proj.weight",
        "final_norm.weight",
    }
    post = names(DsxEncoderModel(tiny_config(norm_position="post", gated_mlp=False)))
    assert not any("final_norm" in name or "gate_proj" in name or "token_type" in name for name in post)
    heads = {
        "masked_lm": {"prediction_head.dense.weight", "prediction_head.norm.weight", "decoder.bias"},
        "sequence": {"pooler.dense.weight", "classifier.weight", "classifier.bias"},
        "token": {"classifier.weight", "classifier.bias"},
        "question": {"qa_outputs.weight", "qa_outputs.bias"},
        "choice": {"pooler.dense.weight", "classifier.weight"},
    }
    for name, expected in heads.items():
        found = names(HEADS[name](tiny_config()))
        assert found >= expected | {"model.embeddings.word_embeddings.weight"}
        assert HEADS[name].base_model_prefix == "model"


def test_shapes_of_all_heads():
    input_ids, mask = token_batch()
    shapes = {"trunk": (3, 9, 32), "masked_lm": (3, 9, 99), "sequence": (3, 3), "token": (3, 9, 3)}
    shapes |= {"question": (3, 9, 2), "choice": (3, 2)}
    for name, model_class in TRUNK_AND_HEADS.items():
        model = build(model_class, tiny_config())
        assert isinstance(model, DsxEncoderPreTrainedModel)
        assert logits_of(name, model(**for_head(name, input_ids, mask))).shape == shapes[name]


@pytest.mark.parametrize("pooling", ["cls", "mean", "max"])
def test_sequence_head_agrees_with_the_reference(pooling):
    for style, side in itertools.product(({}, {"norm_position": "post", "position_embedding_type": "rope"}), SIDES):
        model = build(DsxEncoderForSequenceClassification, tiny_config(classifier_pooling=pooling, **style))
        input_ids, mask = token_batch(side)
        with torch.no_grad():
            found = model(input_ids, attention_mask=mask).logits
        hidden = reference.encode(model.model, input_ids, mask)
        state, rows = double_state(model), []
        for row, seen in zip(hidden, mask.bool(), strict=True):
            real = row[seen]
            pooled = {"cls": real[0], "mean": real.mean(dim=0), "max": real.max(dim=0).values}[pooling]
            dense = torch.tanh(reference.linear(pooled, state, "pooler.dense"))
            rows.append(reference.linear(dense, state, "classifier"))
        assert_close(found.double(), torch.stack(rows), **CLOSE)


def test_token_and_question_heads_agree_with_the_reference():
    for name, layer in (("token", "classifier"), ("question", "qa_outputs")):
        model = build(HEADS[name], tiny_config())
        input_ids, mask = token_batch("left")
        with torch.no_grad():
            found = logits_of(name, model(input_ids, attention_mask=mask)).double()
        expected = reference.linear(reference.encode(model.model, input_ids, mask), double_state(model), layer)
        assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)


def test_padding_takes_no_share_of_an_answer():
    model = build(DsxEncoderForQuestionAnswering, tiny_config())
    for side, dtype in itertools.product(SIDES, (torch.float32, torch.bfloat16, torch.float16)):
        input_ids, mask = token_batch(side)
        with torch.no_grad():
            output = model.to(dtype)(input_ids, attention_mask=mask)
        for logits in (output.start_logits, output.end_logits):
            assert logits.float().softmax(dim=-1)[mask == 0].max() == 0
            assert torch.isfinite(logits).all()


def test_masked_lm_head_agrees_with_the_reference():
    for norm in ("layer_norm", "rms_norm"):
        model = build(DsxEncoderForMaskedLM, tiny_config(norm_type=norm))
        input_ids, mask = token_batch()
        with torch.no_grad():
            found = model(input_ids, attention_mask=mask).logits.double()
        state = double_state(model)
        hidden = reference.encode(model.model, input_ids, mask)
        dense = reference.ACTIVATIONS["gelu"](reference.linear(hidden, state, "prediction_head.dense"))
        dense = reference.normalise(dense, model.config, state, "prediction_head.norm")
        expected = dense @ state["model.embeddings.word_embeddings.weight"].T + state["decoder.bias"]
        assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)


@pytest.mark.parametrize("act", [None, "gelu", "relu"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_what_stands_before_a_classifier_agrees_with_the_reference(pooling, act):
    fields = {"classifier_activation": act, "classifier_pooling": pooling}
    if act is not None:
        fields |= {"classifier_bias": False, "classifier_norm": True, "transform_tokens": True}
    input_ids, mask = token_batch("holes")

    def transform(hidden, name, state, config):
        if act is None:
            return hidden
        dense = reference.ACTIVATIONS[act](hidden @ state[f"{name}.dense.weight"].T)
        return reference.normalise(dense, config, state, f"{name}.norm")

    for name, layer in (("sequence", "classifier"), ("token", "classifier"), ("question", "qa_outputs")):
        model = build(HEADS[name], tiny_config(**fields))
        state, config = double_state(model), model.config
        assert "pooler.dense.bias" not in state
        with torch.no_grad():
            found = logits_of(name, model(input_ids, attention_mask=mask)).double()
        hidden = reference.encode(model.model, input_ids, mask)
        if name != "sequence":
            expected = reference.linear(transform(hidden, "transform", state, config), state, layer)
            assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)
            continue
        for answer, row, seen in zip(found, hidden, mask.bool(), strict=True):
            real = row[seen]
            if pooling == "late":
                vector = transform(real, "pooler", state, config).mean(dim=0)
            else:
                vector = {"cls": real[0], "mean": real.mean(dim=0), "max": real.max(dim=0).values}[pooling]
                vector = transform(vector, "pooler", state, config)
            assert_close(answer, reference.linear(vector, state, layer), **CLOSE)


def test_other_masked_lm_heads_agree_with_the_reference():
    input_ids, mask = token_batch()
    relu, gelu = reference.ACTIVATIONS["relu"], reference.ACTIVATIONS["gelu"]
    narrow = {"embedding_size": 20, "prediction_activation": "relu", "classifier_bias": False}
    mlp = {"prediction_head": "mlp", "prediction_head_size": 12, "decoder_bias": False}
    for fields in (narrow, mlp, {"prediction_head": "none", "tie_word_embeddings": False}):
        model = build(DsxEncoderForMaskedLM, tiny_config(**fields))
        state, config = double_state(model), model.config
        hidden = reference.encode(model.model, input_ids, mask)
        if fields is narrow:
            hidden = relu(hidden @ state["prediction_head.dense.weight"].T)
            hidden = reference.normalise(hidden, config, state, "prediction_head.norm")
        elif fields is mlp:
            hidden = gelu(hidden @ state["prediction_head.dense.weight"].T)
            hidden = gelu(hidden @ state["prediction_head.out_proj.weight"].T)
        else:
            assert not any(key.startswith("prediction_head") for key in state)
        expected = hidden @ state["decoder.weight"].T + state.get("decoder.bias", 0.0)
        with torch.no_grad():
            found = model(input_ids, attention_mask=mask).logits.double()
        assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)
        labels = labels_for("masked_lm", input_ids, mask)["labels"]
        sparse = model.train()(input_ids, attention_mask=mask, labels=labels).loss
        assert_close(sparse, model.eval()(input_ids, attention_mask=mask, labels=labels).loss, **CLOSE)


@pytest.mark.parametrize("side", SIDES)
def test_the_base_model_pools_where_asked(side, tmp_path):
    input_ids, mask = token_batch(side)
    head = build(DsxEncoderForSequenceClassification, tiny_config(add_pooling_layer=True))
    head.save_pretrained(tmp_path / "head")
    trunk, report = DsxEncoderModel.from_pretrained(tmp_path / "head", output_loading_info=True)
    assert not report["missing_keys"]
    assert "pooler.dense.weight" not in report["unexpected_keys"]
    with torch.no_grad():
        output = trunk.eval()(input_ids, attention_mask=mask)
        plain = trunk(input_ids, attention_mask=mask, return_dict=False)
        logits = head(input_ids, attention_mask=mask).logits
    assert_close(head.classifier(output.pooler_output), logits, **CLOSE)
    assert_close(plain[1], output.pooler_output, **CLOSE)
    trunk.save_pretrained(tmp_path / "trunk")
    again, report = DsxEncoderForSequenceClassification.from_pretrained(tmp_path / "trunk", output_loading_info=True)
    assert set(report["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert not report["unexpected_keys"]
    assert torch.equal(again.pooler.dense.weight, head.pooler.dense.weight)
    packed = trunk(input_ids.flatten()[None], position_ids=torch.arange(9).repeat(3)[None])
    assert packed.pooler_output.shape == (3, 32)


def test_choices_are_scored_one_by_one():
    model = build(HEADS["choice"], tiny_config())
    input_ids, mask = token_batch("left")
    inputs = for_head("choice", input_ids, mask)
    with torch.no_grad():
        together = model(**inputs).logits
        for choice in range(2):
            alone = model(
                inputs["input_ids"][:, choice : choice + 1],
                attention_mask=inputs["attention_mask"][:, choice : choice + 1],
            ).logits
            assert_close(together[:, choice : choice + 1], alone, **CLOSE)


@pytest.mark.parametrize("scheme", POSITIONS)
@pytest.mark.parametrize("name", HEADS)
def test_padding_side_does_not_matter(name, scheme):
    """Case 5: the same texts padded left, right, with holes and not at all; every pooling."""
    pools = POOLINGS if name in ("sequence", "choice") else ("cls",)
    for window, pooling in itertools.product(WINDOWS, pools):
        fields = {"position_embedding_type": scheme, "classifier_pooling": pooling, **WINDOWS[window]}
        model = build(HEADS[name], tiny_config(**fields))
        rows, wide = token_batch("right"), 9
        alone = []
        with torch.no_grad():
            for ids, seen in zip(*rows, strict=True):
                inputs = for_head("trunk" if name != "choice" else name, ids[seen.bool()][None])
                alone.append(logits_of(name, model(**inputs))[0])
            for side in SIDES:
                padded_ids, padded_mask = pad_rows([i[m.bool()] for i, m in zip(*rows, strict=True)], wide + 2, side)
                inputs = {"input_ids": padded_ids, "attention_mask": padded_mask}
                if name == "choice":
                    inputs = {key: torch.stack([value, value], dim=1) for key, value in inputs.items()}
                found = logits_of(name, model(**inputs))
                for row, expected in enumerate(alone):
                    got = found[row] if name in ("sequence", "choice") else found[row][padded_mask[row].bool()]
                    where = (window, pooling, side, row)
                    assert_close(got, expected, **CLOSE, msg=lambda text, where=where: f"{where}: {text}")


def pad_rows(rows, width, side):
    """Put rows into `width` columns, left or right or spread with holes."""
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(rows):
        where = {
            "left": torch.arange(width - len(tokens), width),
            "right": torch.arange(len(tokens)),
            "holes": torch.linspace(0, width - 1, len(tokens)).round().long(),
        }[side]
        input_ids[row, where], mask[row, where] = tokens, 1
    return input_ids, mask


@pytest.mark.parametrize("scheme", POSITIONS)
@pytest.mark.parametrize("name", TRUNK_AND_HEADS)
def test_inputs_embeds_equal_input_ids(name, scheme):
    model = build(TRUNK_AND_HEADS[name], tiny_config(position_embedding_type=scheme, type_vocab_size=2))
    for side in SIDES:
        input_ids, mask = token_batch(side)
        inputs = for_head(name, input_ids, mask)
        with torch.no_grad():
            expected = logits_of(name, model(**inputs))
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            found = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"])
            assert_close(logits_of(name, found), expected, **CLOSE)


def test_both_or_no_inputs_are_refused():
    for name, model_class in TRUNK_AND_HEADS.items():
        model = build(model_class, tiny_config())
        inputs = for_head(name, token_batch()[0])
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        with pytest.raises(ValueError, match=r"(?s)input_ids.*inputs_embeds"):
            model(**inputs, inputs_embeds=embeds)
        with pytest.raises(ValueError, match=r"(?s)input_ids.*inputs_embeds"):
            model()


def test_multiple_choice_wants_an_axis_of_choices():
    model = build(HEADS["choice"], tiny_config())
    for inputs in ({"input_ids": token_batch()[0]}, {"inputs_embeds": torch.zeros(3, 9, 32)}):
        with pytest.raises(ValueError, match=r"(?s)choices.*\(3, 9"):
            model(**inputs)


@pytest.mark.parametrize("name", HEADS)
def test_heads_take_what_trainer_and_peft_pass(name):
    """Case 2: extra keywords, tuples in the order loss, logits, hidden states, attentions."""
    model = build(HEADS[name], tiny_config())
    input_ids, mask = token_batch()
    inputs = for_head(name, input_ids, mask) | labels_for(name, input_ids, mask)
    named = model(**inputs, num_items_in_batch=torch.tensor(5), output_hidden_states=True, output_attentions=True)
    listed = model(
        **inputs, num_items_in_batch=5, return_dict=False, output_hidden_states=True, output_attentions=True
    )
    assert isinstance(listed, tuple)
    assert_close(listed[0], named.loss)
    assert listed[0].dim() == 0
    assert_close(listed[1], named.start_logits if name == "question" else named.logits)
    assert len(listed[-2]) == 3
    assert len(listed[-1]) == 2
    inputs.pop("input_ids")
    embeds = model.get_input_embeddings()(for_head(name, input_ids)["input_ids"])
    assert_close(model(inputs_embeds=embeds, **inputs).loss, model(**for_head(name, input_ids), **inputs).loss)
    unlabelled = model(**for_head(name, input_ids, mask), return_dict=False)
    assert len(unlabelled) == (2 if name == "question" else 1)
    model.config.return_dict = False
    assert isinstance(model(**for_head(name, input_ids, mask)), tuple)


@pytest.mark.parametrize("name", TRUNK_AND_HEADS)
def test_hidden_states_are_all_there(name):
    for style in ({"norm_position": "pre"}, {"norm_position": "post"}):
        model = build(TRUNK_AND_HEADS[name], tiny_config(**style))
        trunk = model if name == "trunk" else model.model
        input_ids, mask = token_batch("left")
        inputs = for_head(name, input_ids, mask)
        flat = {key: value.flatten(0, -2) for key, value in inputs.items()}
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
            last = trunk(**flat).last_hidden_state
        assert [state.shape for state in states] == [(*flat["input_ids"].shape, 32)] * 3
        assert_close(states[-1], last, **CLOSE)


def test_outputs_do_not_depend_on_the_asking():
    for scheme in POSITIONS:
        model = build(DsxEncoderModel, tiny_config(position_embedding_type=scheme, **WINDOWS["sliding"]))
        input_ids, mask = token_batch("holes")
        with torch.no_grad():
            plain = model(input_ids, attention_mask=mask).last_hidden_state
            for asked in ({"output_hidden_states": True}, {"output_attentions": True}):
                assert_close(model(input_ids, attention_mask=mask, **asked).last_hidden_state, plain, **CLOSE)


# Losses


def hand_loss(name, output, labels):
    """Summed loss and number of items, in double precision."""
    if name == "question":
        sums = [
            F.cross_entropy(logits.double(), labels[key], reduction="sum")
            for logits, key in ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
        ]
        return sum(sums) / 2, len(labels["start_positions"])
    wanted = labels["labels"]
    logits = output.logits.double().flatten(0, -2)
    return F.cross_entropy(logits, wanted.flatten(), reduction="sum"), int((wanted != -100).sum())


@pytest.mark.parametrize("name", HEADS)
def test_loss_is_the_sum_over_the_number_of_items(name):
    model = build(HEADS[name], tiny_config())
    input_ids, mask = token_batch()
    inputs, labels = for_head(name, input_ids, mask), labels_for(name, input_ids, mask)
    output = model(**inputs, **labels)
    total, count = hand_loss(name, output, labels)
    assert count > 1
    assert_close(output.loss.double(), total / count, **CLOSE)
    for number in (40, torch.tensor(40)):
        shared = model(**inputs, **labels, num_items_in_batch=number).loss
        assert_close(shared.double(), total / 40, **CLOSE)


def test_multi_label_and_regression_losses_by_hand():
    input_ids, mask = token_batch()
    model = build(DsxEncoderForSequenceClassification, tiny_config())
    hot = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
    for labels in (hot, hot.bool(), hot.float(), hot.to(torch.uint8)):
        output = model(input_ids, attention_mask=mask, labels=labels)
        expected = F.binary_cross_entropy_with_logits(output.logits, hot.float())
        assert_close(output.loss, expected, **CLOSE)
        shared = model(input_ids, attention_mask=mask, labels=labels, num_items_in_batch=90).loss
        assert_close(shared, expected * 9 / 90, **CLOSE)
    model = build(DsxEncoderForSequenceClassification, tiny_config(num_labels=1))
    for labels in (torch.tensor([1.5, -2.0, 0.0]), torch.tensor([[1.5], [-2.0], [0.0]])):
        output = model(input_ids, attention_mask=mask, labels=labels)
        expected = F.mse_loss(output.logits.flatten(), labels.flatten())
        assert output.logits.shape == (3, 1)
        assert_close(output.loss, expected, **CLOSE)
        shared = model(input_ids, attention_mask=mask, labels=labels, num_items_in_batch=30).loss
        assert_close(shared, expected / 10, **CLOSE)
    whole = model(input_ids, attention_mask=mask, labels=torch.tensor([1, 2, 3]))
    assert_close(whole.loss, F.mse_loss(whole.logits.flatten(), torch.tensor([1.0, 2.0, 3.0])), **CLOSE)
    model = build(DsxEncoderForSequenceClassification, tiny_config(problem_type="regression"))
    targets = torch.randn(3, 3)
    output = model(input_ids, attention_mask=mask, labels=targets)
    assert_close(output.loss, F.mse_loss(output.logits, targets), **CLOSE)


def test_multi_label_elements_may_be_left_out():
    model = build(DsxEncoderForSequenceClassification, tiny_config())
    labels = torch.tensor([[1, 0, -100], [0, -100, -100], [1, 1, 1]])
    output = model(token_batch()[0], labels=labels)
    kept = labels != -100
    expected = F.binary_cross_entropy_with_logits(output.logits[kept], labels[kept].float())
    assert_close(output.loss, expected, **CLOSE)


def test_problem_type_is_chosen_without_writing_it_down():
    model = build(DsxEncoderForSequenceClassification, tiny_config())
    input_ids, mask = token_batch()
    before = model.config.to_dict()
    single, hot = torch.tensor([0, 2, 1]), torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 1, 0]])
    for _ in range(2):  # each kind after the other: nothing sticks
        output = model(input_ids, attention_mask=mask, labels=single)
        assert_close(output.loss, F.cross_entropy(output.logits, single), **CLOSE)
        output = model(input_ids, attention_mask=mask, labels=hot)
        assert_close(output.loss, F.binary_cross_entropy_with_logits(output.logits, hot), **CLOSE)
    assert model.config.problem_type is None
    assert model.config.to_dict() == before


def test_problem_type_of_the_configuration_wins():
    hot = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 1, 0]])
    for kind, loss in (("regression", F.mse_loss), ("multi_label_classification", F.binary_cross_entropy_with_logits)):
        model = build(DsxEncoderForSequenceClassification, tiny_config(problem_type=kind))
        output = model(token_batch()[0], labels=hot)
        assert_close(output.loss, loss(output.logits, hot), **CLOSE)
    model = build(DsxEncoderForSequenceClassification, tiny_config(problem_type="single_label_classification"))
    output = model(token_batch()[0], labels=torch.tensor([[0], [2], [1]]))
    assert_close(output.loss, F.cross_entropy(output.logits, torch.tensor([0, 2, 1])), **CLOSE)
    model = build(
        DsxEncoderForSequenceClassification, tiny_config(num_labels=1, problem_type="multi_label_classification")
    )
    output = model(token_batch()[0], labels=torch.tensor([[1], [0], [1]]))
    expected = F.binary_cross_entropy_with_logits(output.logits, torch.tensor([[1.0], [0.0], [1.0]]))
    assert_close(output.loss, expected, **CLOSE)


@pytest.mark.parametrize("name", HEADS)
def test_label_dtypes(name):
    """Any integer or float dtype gives the loss of int64; -100 needs a signed one."""
    model = build(HEADS[name], tiny_config())
    input_ids, mask = token_batch(lengths=(9, 9, 9))
    labels = labels_for(name, input_ids, mask)
    expected = model(**for_head(name, input_ids, mask), **labels).loss
    full = {key: value.clamp(min=0) for key, value in labels.items()}
    unsigned = model(**for_head(name, input_ids, mask), **full).loss
    for dtype in (*INTEGERS, *FLOATS):
        signed = dtype is not torch.uint8
        cast = {key: value.to(dtype) for key, value in (labels if signed else full).items()}
        loss = model(**for_head(name, input_ids, mask), **cast).loss
        assert_close(loss, expected if signed else unsigned, **CLOSE, msg=lambda text, dtype=dtype: f"{dtype}: {text}")


def test_boolean_labels():
    input_ids, mask = token_batch()
    model = build(DsxEncoderForSequenceClassification, tiny_config(num_labels=2))
    flags = torch.tensor([True, False, True])
    output = model(input_ids, attention_mask=mask, labels=flags)
    assert_close(output.loss, F.cross_entropy(output.logits, flags.long()), **CLOSE)
    model = build(DsxEncoderForSequenceClassification, tiny_config(num_labels=1))
    for dtype in (torch.bool, *INTEGERS, *FLOATS):
        output = model(input_ids, attention_mask=mask, labels=torch.tensor([1, 0, 1]).to(dtype))
        assert_close(output.loss, F.mse_loss(output.logits.flatten(), torch.tensor([1.0, 0.0, 1.0])), **CLOSE)


@pytest.mark.parametrize("name", ["masked_lm", "sequence", "token", "choice"])
@pytest.mark.parametrize("train", [True, False])
def test_labels_out_of_range_are_refused(name, train):
    model = build(HEADS[name], tiny_config()).train(train)
    input_ids, mask = token_batch()
    limit, size = {"masked_lm": (99, "vocab_size"), "choice": (2, "choices")}.get(name, (3, "num_labels"))
    for wrong in (limit, limit + 5, -1, -7):
        labels = labels_for(name, input_ids, mask)["labels"]
        labels.view(-1)[0] = wrong
        with pytest.raises(
            ValueError, match=rf"(?s)(?=.*labels)(?=.*{size})(?=.*\b{limit}\b|.*\b{limit - 1}\b).*{wrong}"
        ):
            model(**for_head(name, input_ids, mask), labels=labels)


def test_fractions_are_no_classes():
    model = build(DsxEncoderForSequenceClassification, tiny_config())
    with pytest.raises((ValueError, TypeError), match=r"(?s)labels.*0\.5"):
        model(token_batch()[0], labels=torch.tensor([0.5, 1.0, 2.0]))


def test_labels_of_a_wrong_shape_are_refused():
    input_ids = token_batch()[0]
    model = build(DsxEncoderForSequenceClassification, tiny_config())
    for labels in (torch.zeros(2, dtype=torch.long), torch.zeros(3, 2), torch.zeros(3, 9, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"(?s)labels.*\("):
            model(input_ids, labels=labels)
    with pytest.raises(ValueError, match=r"(?s)labels.*\(4,\).*regression.*\(3, 1\)"):
        build(DsxEncoderForSequenceClassification, tiny_config(num_labels=1))(input_ids, labels=torch.zeros(4))
    for name in ("token", "masked_lm"):
        with pytest.raises(ValueError, match=r"(?s)labels.*3, 8"):
            build(HEADS[name], tiny_config())(input_ids, labels=torch.zeros(3, 8, dtype=torch.long))


@pytest.mark.parametrize("name", ["masked_lm", "sequence", "token", "choice"])
@pytest.mark.parametrize("number", [None, 4])
def test_nothing_labelled_gives_zero_with_a_graph(name, number):
    for train in (True, False):
        model = build(HEADS[name], tiny_config()).train(train)
        input_ids, mask = token_batch()
        labels = torch.full_like(labels_for(name, input_ids, mask)["labels"], -100)
        loss = model(**for_head(name, input_ids, mask), labels=labels, num_items_in_batch=number).loss
        assert loss.item() == 0.0
        loss.backward()
        assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values())


@pytest.mark.parametrize("at_once", [modeling.MAX_LOGITS, 2 * 99, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_sparse_prediction_equals_dense(tied, at_once, monkeypatch):
    monkeypatch.setattr(modeling, "MAX_LOGITS", at_once)
    input_ids, mask = token_batch()
    labels = labels_for("masked_lm", input_ids, mask)["labels"]
    found = {}
    for sparse in (True, False):
        model = build(DsxEncoderForMaskedLM, tiny_config(sparse_prediction=sparse, tie_word_embeddings=tied)).train()
        output = model(input_ids, attention_mask=mask, labels=labels)
        output.loss.backward()
        found[sparse] = (output, gradients(model))
    sparse, dense = found[True][0], found[False][0]
    assert sparse.logits is None
    assert dense.logits.shape == (3, 9, 99)
    assert_close(sparse.loss, dense.loss, **CLOSE)
    for name, gradient in found[False][1].items():
        assert_close(found[True][1][name], gradient, **CLOSE)
    model = build(DsxEncoderForMaskedLM, tiny_config())
    assert model(input_ids, attention_mask=mask, labels=labels).logits.shape == (3, 9, 99)
    assert model.train()(input_ids, attention_mask=mask).logits.shape == (3, 9, 99)


def test_question_positions_of_any_shape_and_dtype():
    model = build(DsxEncoderForQuestionAnswering, tiny_config())
    input_ids, mask = token_batch()
    start, end = torch.tensor([0, 1, 2]), torch.tensor([3, 2, 5])
    expected = model(input_ids, attention_mask=mask, start_positions=start, end_positions=end).loss
    column = model(input_ids, attention_mask=mask, start_positions=start[:, None], end_positions=end[:, None]).loss
    assert_close(column, expected)


@pytest.mark.parametrize("side", SIDES)
def test_answers_that_were_cut_off_are_no_items(side):
    """Past the row or on padding; the loss is that of the other rows, and finite where no row has an answer."""
    model = build(DsxEncoderForQuestionAnswering, tiny_config())
    input_ids, mask = token_batch(side)
    whole = mask.argmax(dim=1)
    for lost in (int((mask[1] == 0).nonzero()[0]), 9, 10**6, -1):
        places = whole.clone()
        places[1] = lost
        loss = model(input_ids, attention_mask=mask, start_positions=places, end_positions=places).loss
        rest = [model(input_ids[[row]], attention_mask=mask[[row]], start_positions=whole[[row]],
                      end_positions=whole[[row]]).loss for row in (0, 2)]  # fmt: skip
        assert_close(loss, torch.stack(rest).mean(), **CLOSE)
    nowhere = torch.full((3,), 99)
    assert model(input_ids, attention_mask=mask, start_positions=nowhere, end_positions=nowhere).loss == 0


# Case 1: gradient accumulation, by the real Trainer


def train_once(model, features, batch_size, folder, **more):
    """One optimiser step with learning rate 0; returns the logged loss and gradient norm."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=8 // batch_size,
        max_steps=1,
        learning_rate=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        max_grad_norm=1.0,
        dataloader_pin_memory=False,
        label_names=["start_positions", "end_positions"] if "start_positions" in features[0] else None,
        **more,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=features, data_collator=default_data_collator)
    trainer.train()
    return next((log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log)


ACCUMULATED = [*HEADS, "regression", "multi-label"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ACCUMULATED)
def test_accumulation_does_not_change_the_loss(kind, tmp_path):
    name = "sequence" if kind in ("regression", "multi-label") else kind
    scheme = POSITIONS[ACCUMULATED.index(kind) % len(POSITIONS)]
    input_ids, mask = token_batch(lengths=(9, 3, 5, 9, 2, 7, 4, 6))
    inputs = for_head(name, input_ids, mask) | labels_for(name, input_ids, mask)
    if kind == "regression":
        inputs["labels"] = torch.randn(8)
    elif kind == "multi-label":
        inputs["labels"] = (torch.randn(8, 3) > 0).float()
    features = [{key: value[row] for key, value in inputs.items()} for row in range(8)]
    config = tiny_config(position_embedding_type=scheme, num_labels=1 if kind == "regression" else 3)
    once = train_once(build(HEADS[name], config), features, 8, tmp_path)
    often = train_once(build(HEADS[name], config), features, 2, tmp_path)
    assert once[0] > 0.1
    assert often == pytest.approx(once, rel=1e-4)


# Loading and saving


@pytest.mark.parametrize("name", TRUNK_AND_HEADS)
def test_every_value_survives_saving(name, tmp_path):
    """Case 12: each parameter unique; class, AutoModel, bfloat16; tables equal to their formulas after each."""
    model_class = TRUNK_AND_HEADS[name]
    for scheme in POSITIONS if name in ("trunk", "masked_lm") else ("rope", "sinusoidal"):
        config = tiny_config(position_embedding_type=scheme, embedding_norm=True, type_vocab_size=2, norm_bias=True)
        model = build(model_class, config)
        folder = tmp_path / scheme
        model.save_pretrained(folder)
        for loader, dtype in ((model_class, None), (AUTO[name], None), (AUTO[name], torch.bfloat16)):
            more = {} if dtype is None else {"dtype": dtype}
            loaded, report = loader.from_pretrained(folder, output_loading_info=True, **more)
            assert type(loaded) is model_class
            assert not any(report.values()), report
            for key, value in model.state_dict().items():
                expected = value if dtype is None else value.to(dtype)
                assert torch.equal(loaded.state_dict()[key], expected), (scheme, key)
            check_tables(loaded, model)


@pytest.mark.parametrize("act", ["prelu", "xielu"])
@pytest.mark.parametrize("field", ["hidden_act", "prediction_activation", "classifier_activation"])
def test_activations_with_values_of_their_own_start_as_new_and_survive_saving(field, act, tmp_path):
    for name, model_class in TRUNK_AND_HEADS.items():
        torch.manual_seed(0)
        model = model_class(tiny_config(**{field: act}))
        fresh = ACT2FN[act].state_dict()
        for module in model.modules():
            if type(module) is type(ACT2FN[act]):
                assert all(torch.equal(value, fresh[key]) for key, value in module.state_dict().items())
        model = build(model_class, tiny_config(**{field: act}))
        model.save_pretrained(tmp_path / name)
        loaded = model_class.from_pretrained(tmp_path / name)
        assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def check_tables(loaded, model):
    """Non-persistent buffers: fp32 and bit-equal to those of a freshly built model."""
    expected = dict(model.named_buffers())
    found = dict(loaded.named_buffers())
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype == torch.float32, key
        assert torch.equal(found[key], value), key


def test_a_trunk_loads_from_any_head_and_back(tmp_path):
    for name, model_class in HEADS.items():
        head = build(model_class, tiny_config(position_embedding_type="rope"))
        head.save_pretrained(tmp_path / name)
        trunk, report = DsxEncoderModel.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not report["missing_keys"]
        for key, value in trunk.state_dict().items():
            assert torch.equal(value, head.model.state_dict()[key])
    trunk.save_pretrained(tmp_path / "trunk")
    head, report = DsxEncoderForTokenClassification.from_pretrained(tmp_path / "trunk", output_loading_info=True)
    assert {key.split(".")[0] for key in report["missing_keys"]} == {"classifier"}
    assert torch.equal(head.model.layers[1].mlp.up_proj.weight, trunk.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_and_resizing(tied, tmp_path):
    """Case 13: storage shared iff tied, through saving, Trainer.save_model and a padded resize."""
    model = build(DsxEncoderForMaskedLM, tiny_config(tie_word_embeddings=tied))

    def shared(some):
        return some.decoder.weight.data_ptr() == some.model.embeddings.word_embeddings.weight.data_ptr()

    assert shared(model) == tied
    old = {key: value.clone() for key, value in model.state_dict().items()}
    model.resize_token_embeddings(101, pad_to_multiple_of=64)
    assert model.config.vocab_size == 128
    assert model.decoder.weight.shape == model.model.embeddings.word_embeddings.weight.shape == (128, 32)
    assert model.decoder.bias.shape == (128,)
    assert model.decoder.out_features == 128
    assert torch.equal(model.decoder.bias[:99], old["decoder.bias"])
    assert torch.equal(model.decoder.weight[:99], old["decoder.weight"])
    assert shared(model) == tied
    input_ids = torch.tensor([[127, 7, 100]])
    labels = torch.tensor([[-100, 120, -100]])
    output = model(input_ids, labels=labels)
    assert output.logits.shape == (1, 3, 128)
    assert_close(output.loss, F.cross_entropy(output.logits[0, 1:2], labels[0, 1:2]), **CLOSE)
    sparse = model.train()(input_ids, labels=labels)
    assert_close(sparse.loss, output.loss, **CLOSE)
    sparse.loss.backward()
    arguments = TrainingArguments(output_dir=str(tmp_path / "trainer"), report_to=[], use_cpu=True)
    Trainer(model=model, args=arguments).save_model(str(tmp_path / "saved"))
    loaded, report = DsxEncoderForMaskedLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()), report
    assert shared(loaded) == tied
    assert loaded.config.vocab_size == 128
    with torch.no_grad():
        assert_close(loaded(input_ids).logits, model.eval()(input_ids).logits, **CLOSE)


def test_other_heads_resize_too():
    for name, model_class in TRUNK_AND_HEADS.items():
        model = build(model_class, tiny_config())
        model.resize_token_embeddings(120)
        assert model.config.vocab_size == 120
        model(**for_head(name, torch.full((2, 4), 119)))
        model.resize_token_embeddings(50)
        assert model.get_input_embeddings().weight.shape == (50, 32)


def test_input_and_output_embeddings_can_be_set():
    model = build(DsxEncoderForMaskedLM, tiny_config())
    assert model.get_input_embeddings() is model.model.embeddings.word_embeddings
    assert model.get_output_embeddings() is model.decoder
    fresh = torch.nn.Embedding(99, 32)
    model.set_input_embeddings(fresh)
    model.tie_weights()
    assert model.model.embeddings.word_embeddings is fresh
    assert model.decoder.weight.data_ptr() == fresh.weight.data_ptr()
    assert DsxEncoderForTokenClassification(tiny_config()).get_output_embeddings() is None


def test_deep_copies_are_equal_and_apart():
    for name, model_class in TRUNK_AND_HEADS.items():
        for scheme in POSITIONS:
            model = build(model_class, tiny_config(position_embedding_type=scheme))
            inputs = for_head(name, *token_batch("left"))
            twin = copy.deepcopy(model)
            with torch.no_grad():
                expected = logits_of(name, model(**inputs))
                assert_close(logits_of(name, twin(**inputs)), expected, atol=0, rtol=0)
                for parameter in twin.parameters():
                    parameter.zero_()
                assert_close(logits_of(name, model(**inputs)), expected, atol=0, rtol=0)


def test_state_dict_holds_parameters_only():
    for scheme in POSITIONS:
        model = DsxEncoderForSequenceClassification(tiny_config(position_embedding_type=scheme))
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


# Initialisation


def stds(initializer, num_layers=3, **fields):
    config = tiny_config(
        hidden_size=128, num_hidden_layers=num_layers, vocab_size=600, initializer=initializer, intermediate_size=256,
        mlp_bias=True, attention_bias=True, type_vocab_size=2, embedding_norm=True, **fields,
    )  # fmt: skip
    return dict(DsxEncoderForMaskedLM(config).named_parameters())


@pytest.mark.parametrize("initializer", ["normal", "xavier_uniform", "scaled_normal"])
def test_biases_start_at_zero_and_scales_at_one(initializer):
    for name, parameter in stds(initializer).items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


@pytest.mark.parametrize("spread", [0.02, 0.1])
def test_normal_initialiser(spread):
    for name, parameter in stds("normal", initializer_range=spread).items():
        if parameter.dim() == 2 and parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(spread, rel=0.05), name
            assert abs(parameter.mean().item()) < spread / 10, name


def test_scaled_normal_initialiser_shrinks_what_writes_to_the_residual():
    for name, parameter in stds("scaled_normal").items():
        if parameter.dim() == 2 and parameter.numel() > 1000:
            writes = "out_proj" in name or "down_proj" in name
            expected = 0.02 / math.sqrt(2 * 3) if writes else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_xavier_initialiser():
    for name, parameter in stds("xavier_uniform").items():
        if any(f"{part}.weight" in name for part in ("out_proj", "up_proj", "gate_proj", "down_proj", "head.dense")):
            bound = math.sqrt(6.0 / sum(parameter.shape))
            assert parameter.abs().max().item() <= bound, name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3.0), rel=0.05), name
        elif "qkv_proj.weight" in name:  # each of the three maps is its own 128 to 128
            bound = math.sqrt(6.0 / 256)
            assert parameter.abs().max().item() <= bound, name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3.0), rel=0.05), name


def test_the_seed_decides_the_weights():
    first = build_with_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, build_with_seed(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, build_with_seed(2), strict=True))


def build_with_seed(seed):
    torch.manual_seed(seed)
    return list(DsxEncoderForSequenceClassification(tiny_config()).state_dict().values())


# Training


@pytest.mark.parametrize("name", HEADS)
def test_every_parameter_learns(name):
    for at, config in config_grid(type_vocab_size=2, embedding_norm=True, attention_bias=True, mlp_bias=True):
        model = build(HEADS[name], config).train()
        input_ids, mask = token_batch("left")
        types = input_ids % 2
        inputs = for_head(name, input_ids, mask, token_type_ids=types)
        model(**inputs, **labels_for(name, input_ids, mask)).loss.backward()
        still = [
            key
            for key, gradient in gradients(model).items()
            if not gradient.any() and not (name == "choice" and key == "classifier.bias")  # cancels in the softmax
        ]
        assert not still, (at, still)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_gradient_checkpointing_changes_nothing(name, reentrant):
    for scheme in ("learned", "rope", "relative_bias") if name == "sequence" else ("sinusoidal",):
        config = tiny_config(position_embedding_type=scheme, hidden_dropout=0.3, attention_dropout=0.2)
        input_ids, mask = token_batch("holes")
        inputs = for_head(name, input_ids, mask) | labels_for(name, input_ids, mask)
        found = []
        for checkpointing in (False, True):
            model = build(HEADS[name], config).train()
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
                model.enable_input_require_grads()
            torch.manual_seed(7)
            loss = model(**inputs).loss
            loss.backward()
            found.append((loss.detach(), gradients(model)))
        (plain, first), (saved, second) = found
        assert_close(saved, plain, **CLOSE)
        for key in first:
            assert_close(second[key], first[key], **CLOSE)


@pytest.mark.parametrize("name", ["sequence", "choice", "token"])
def test_classifier_dropout_stands_before_the_classifier(name):
    config = tiny_config(**NO_DROPOUT)
    config.classifier_dropout = 1.0  # not checked on assignment, and 1.0 is refused at construction
    model = build(HEADS[name], config).train()
    logits = model(**for_head(name, *token_batch())).logits
    logits = logits[token_batch()[1].bool()] if name == "token" else logits  # those on padding are 0
    assert_close(logits, model.classifier.bias.detach().expand_as(logits), **CLOSE)
    still = build(HEADS[name], tiny_config(classifier_dropout=0.0, **NO_DROPOUT))
    still.load_state_dict(model.state_dict())
    inputs = for_head(name, *token_batch())
    assert_close(still.train()(**inputs).logits, model.eval()(**inputs).logits, **CLOSE)


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TRUNK_AND_HEADS)
def test_half_precision_stays_near(name, dtype):
    for at, config in config_grid(classifier_pooling="mean"):
        model = build(TRUNK_AND_HEADS[name], config)
        inputs = for_head(name, *token_batch("left"))
        with torch.no_grad():
            exact = logits_of(name, model(**inputs))
            found = logits_of(name, model.to(dtype)(**inputs))
        assert found.dtype == dtype
        if name == "question":  # padding has the dtype's minimum
            exact, found = exact[inputs["attention_mask"] == 1], found[inputs["attention_mask"] == 1]
        error = (found.float() - exact).abs().max() / exact.abs().max()
        assert error < (0.08 if dtype == torch.bfloat16 else 0.012), at


@pytest.mark.parametrize("name", HEADS)
def test_autocast_gives_finite_losses_and_gradients(name):
    for at, config in config_grid():
        model = build(HEADS[name], config).train()
        input_ids, mask = token_batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**for_head(name, input_ids, mask), **labels_for(name, input_ids, mask)).loss
        loss.backward()
        assert loss.dtype == torch.float32, at
        assert torch.isfinite(loss), at
        assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values()), at


def test_mean_pooling_of_a_long_text_in_fp16():
    """Case 4: 8,192 tokens with hidden values near 20 overflow a sum kept in half precision."""
    config = tiny_config(
        hidden_size=8,
        num_attention_heads=1,
        intermediate_size=8,
        num_hidden_layers=1,
        position_embedding_type="none",
        classifier_pooling="mean",
    )
    model = build(DsxEncoderForSequenceClassification, config).half()
    with torch.no_grad():
        model.model.final_norm.weight.fill_(0.5)
        model.model.final_norm.bias.fill_(20.0)
        model.pooler.dense.weight.copy_(0.01 * torch.eye(8))
        model.pooler.dense.bias.zero_()
    pooled = []
    model.pooler.register_forward_hook(lambda module, inputs, output: pooled.append(inputs))
    model.pooler.dense.register_forward_hook(lambda module, inputs, output: pooled.append(inputs[0]))
    input_ids = torch.randint(5, 99, (1, 8192))
    masks = (None, torch.ones(1, 8192, dtype=torch.long), (torch.arange(8192) >= 2000).long()[None])
    for mask in masks:
        pooled.clear()
        with torch.no_grad():
            logits = model(input_ids, attention_mask=mask).logits
            hidden = model.model(input_ids, attention_mask=mask).last_hidden_state.float()
        seen = torch.ones(1, 8192) if mask is None else mask
        mean = (hidden * seen[..., None]).sum(dim=1) / seen.sum()
        assert torch.isfinite(logits).all()
        assert_close(pooled[-1 if torch.is_tensor(pooled[-1]) else 0].float().view(1, 8), mean, atol=1e-2, rtol=0)


def test_pooling_of_an_empty_row_is_finite():
    for pooling, dtype in itertools.product(POOLINGS, (torch.float32, torch.bfloat16, torch.float16)):
        model = build(DsxEncoderForSequenceClassification, tiny_config(classifier_pooling=pooling)).to(dtype).train()
        input_ids, mask = token_batch()
        mask[1] = 0
        output = model(input_ids, attention_mask=mask, labels=torch.tensor([0, 1, 2]))
        output.loss.backward()
        assert torch.isfinite(output.logits).all(), pooling
        assert all(torch.isfinite(gradient).all() for gradient in gradients(model).values()), pooling


# Abilities that other tools look at


def test_declared_abilities():
    assert DsxEncoderPreTrainedModel.supports_gradient_checkpointing
    assert DsxEncoderPreTrainedModel._supports_sdpa
    model = DsxEncoderForMaskedLM(tiny_config())
    blocks = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) & blocks
    assert type(model.model.layers[0]).__name__ in model._no_split_modules
    names = [name for name, _ in model.model.named_modules()]
    for pattern in model.config.base_model_tp_plan or {}:
        wanted = pattern.replace("*", "0")
        if wanted == "layers.0.mlp.gate_proj" or "gate_proj" not in wanted:
            assert wanted in names, pattern


def test_nothing_is_printed_or_warned(capfd, recwarn):
    for name, model_class in TRUNK_AND_HEADS.items():
        model = build(model_class, tiny_config())
        input_ids, mask = token_batch("left")
        labels = {} if name == "trunk" else labels_for(name, input_ids, mask)
        model(**for_head(name, input_ids, mask), **labels, output_attentions=True)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert [str(warning.message) for warning in recwarn.list] == []


class Logits(torch.nn.Module):
    """Tracing wants tensors in and a tensor out."""

    def __init__(self, name, model):
        super().__init__()
        self.name, self.model = name, model

    def forward(self, input_ids, attention_mask):
        return logits_of(self.name, self.model(input_ids=input_ids, attention_mask=attention_mask))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HEADS)
def test_heads_export_and_trace(name):
    pooling = {"sequence": "max", "choice": "mean"}.get(name, "cls")
    model = Logits(name, build(HEADS[name], tiny_config(classifier_pooling=pooling)))
    example = tuple(for_head(name, *token_batch("right")).values())
    with torch.no_grad():
        exported = torch.export.export(model, example, strict=False).module()
        traced = torch.jit.trace(model, example, check_trace=False)
        for side in SIDES:
            inputs = tuple(for_head(name, *token_batch(side)).values())
            expected = model(*inputs)
            assert_close(exported(*inputs), expected, **CLOSE)
            assert_close(traced(*inputs), expected, **CLOSE)


def test_training_step_compiles():
    """Sparse prediction chooses rows by value, which compile must not trip over."""
    torch.compiler.reset()
    model = build(DsxEncoderForMaskedLM, tiny_config()).train()
    input_ids, mask = token_batch()
    labels = labels_for("masked_lm", input_ids, mask)["labels"]
    expected = model(input_ids, attention_mask=mask, labels=labels).loss
    compiled = torch.compile(model, backend="eager")
    assert_close(compiled(input_ids, attention_mask=mask, labels=labels).loss, expected, **CLOSE)


@pytest.mark.parametrize("shape", [(3, 40), (1, 17), (2, 1)])
def test_a_long_text_through_the_feed_forward_in_parts_gives_the_same(shape, monkeypatch):
    model = build(DsxEncoderModel, tiny_config(mlp_bias=True))
    input_ids = torch.randint(5, 99, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids).last_hidden_state
        for at_once in (48 * 7, 48, 1):
            monkeypatch.setattr(modeling, "MAX_INNER_ELEMENTS", at_once)
            assert_close(model(input_ids).last_hidden_state, expected, **CLOSE)


def test_tracing_checks_itself_with_and_without_gradients():
    """torch.jit.trace traces again without gradients by default, and compares both graphs."""
    model = build(DsxEncoderModel, tiny_config(return_dict=False))
    example = token_batch()
    traced = torch.jit.trace(model, example)
    assert_close(traced(*example)[0], model(*example)[0], **CLOSE)
