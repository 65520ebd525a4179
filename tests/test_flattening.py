"""The collator that lays texts end to end: every form of labels, and what it refuses."""

import numpy as np
import pytest
import torch
from learner import text_rows
from torch.testing import assert_close

from modeling_dsx_encoder.flattening import FlatteningCollator
from modeling_dsx_encoder.masking import MaskedLanguageModelingCollator

TOKENS = ([5, 6, 7], [8], [9, 10, 11, 12])


def rows(**columns):
    return [
        {"input_ids": ids, **{name: values[i] for name, values in columns.items()}} for i, ids in enumerate(TOKENS)
    ]


def test_texts_lie_end_to_end_and_positions_restart():
    batch = FlatteningCollator()(rows(token_type_ids=[[0, 0, 1], [0], [0, 1, 1, 1]], attention_mask=[[1] * 4] * 3))
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 10, 11, 12]],
        "position_ids": [[0, 1, 2, 0, 0, 1, 2, 3]],
        "token_type_ids": [[0, 0, 1, 0, 0, 1, 1, 1]],
    }
    assert {values.dtype for values in batch.values()} == {torch.int64}


def test_edges_for_flash_attention():
    batch = FlatteningCollator(return_flash_attn_kwargs=True, return_seq_idx=True)(rows())
    for side in "qk":
        assert batch[f"cu_seq_lens_{side}"].tolist() == [0, 3, 4, 8]
        assert batch[f"cu_seq_lens_{side}"].dtype == torch.int32
        assert batch[f"max_length_{side}"] == 4
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2, 2, 2]]


@pytest.mark.parametrize("name", ["labels", "label", "label_ids"])
@pytest.mark.parametrize("form", [list, torch.tensor, np.array])
@pytest.mark.parametrize(
    ("labels", "expected", "dtype"),
    [
        ([2, 0, 1], [2, 0, 1], torch.int64),
        ([0.5, -1.0, 2.0], [0.5, -1.0, 2.0], torch.float32),
        ([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]], torch.float32),
        ([[1, 0], [0, 0], [1, 1]], [[1, 0], [0, 0], [1, 1]], torch.int64),
        ([[3, -100, 1], [2], [0, 1, 2, -100]], [[3, -100, 1, 2, 0, 1, 2, -100]], torch.int64),
    ],
)
def test_labels_of_texts_and_of_tokens(name, form, labels, expected, dtype):
    """Case 7: numbers, floats, flags; and a label for each token, of which the first is kept too."""
    if form is not list:
        kind = {torch.float32: torch.float32, torch.int64: torch.int64}[dtype]
        labels = [form(label, dtype=kind if form is torch.tensor else str(kind)[6:]) for label in labels]
    found = FlatteningCollator()(rows(**{name: labels}))["labels"]
    assert found.dtype == dtype
    assert_close(found, torch.tensor(expected))


def test_places_of_answers_stay_places_in_their_own_text():
    batch = FlatteningCollator()(rows(start_positions=[1, 0, 2], end_positions=[2, 0, 9]))
    assert batch["start_positions"].tolist() == [1, 0, 2]
    assert batch["end_positions"].tolist() == [2, 0, 9]
    assert "labels" not in batch


def test_flags_as_many_as_tokens_are_told_apart_on_request():
    features = [{"input_ids": [5, 6], "labels": [1, 0]}, {"input_ids": [7, 8], "labels": [0, 1]}]
    assert FlatteningCollator()(features)["labels"].tolist() == [[1, 0, 0, 1]]
    assert FlatteningCollator(labels_per="text")(features)["labels"].tolist() == [[1, 0], [0, 1]]
    assert FlatteningCollator(labels_per="token")(features)["labels"].tolist() == [[1, 0, 0, 1]]
    floats = [row | {"labels": [float(label) for label in row["labels"]]} for row in features]
    assert FlatteningCollator()(floats)["labels"].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels_per": "row"}, "labels_per is 'row'.*'text', 'token'"),
        ({"position_ids_start": 2}, "position_ids_start is 2.*counts from 0.*position_offset"),
        ({"return_position_ids": False}, "return_position_ids=False.*return_flash_attn_kwargs=True"),
        ({"return_tensors": "np"}, "return_tensors is 'np'.*'pt'"),
    ],
)
def test_options_that_hide_the_texts_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FlatteningCollator(**options)(rows())


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([{"input_ids": [5]}, {"input_ids": []}], "row 1 of the batch has no token.*leave empty rows out"),
        ([{"text": "a"}], r"\['text'\].*takes input_ids"),
        ([{"input_ids": [5], "labels": 1}, {"input_ids": [5]}], "row 1 of the batch has no labels"),
        ([{"input_ids": [5, 0], "attention_mask": [1, 0]}], "row 0 of the batch is padded already"),
        ([{"input_ids": [5, 6], "token_type_ids": [0]}], "token_type_ids of row 0 is 1 values.*2 tokens"),
    ],
)
def test_rows_that_cannot_be_flattened_are_refused(features, message):
    with pytest.raises(ValueError, match=message):
        FlatteningCollator()(features)


def test_labels_of_tokens_must_be_one_each():
    for labels, found in ((3, "is 3"), ([1], "is 1 values")):
        with pytest.raises(ValueError, match=f"labels of row 0 {found}.*2 tokens"):
            FlatteningCollator(labels_per="token")([{"input_ids": [5, 6], "labels": labels}])


def test_masked_rows_can_be_flattened(tiny_tokenizer):
    lines = list(text_rows(5))
    padded, flat = (MaskedLanguageModelingCollator(tiny_tokenizer, seed=1, flatten=f)(lines) for f in (False, True))
    real = padded["attention_mask"].bool()
    for name in ("input_ids", "labels"):
        assert torch.equal(flat[name], padded[name][real][None])
    assert flat["position_ids"].shape == (1, int(real.sum()))
    with pytest.raises(ValueError, match=r"pad_to_multiple_of is 8.*flatten=True"):
        MaskedLanguageModelingCollator(tiny_tokenizer, pad_to_multiple_of=8, flatten=True)
