"""Self-contained model folders: export one from a run, verify it as a stranger would load it, push it to the Hub.

- `export()` gathers weights, the shipped code (every `*_dsx_encoder.py`), a config with the complete `auto_map`, the
  tokenizer, and a model card filled with the data and figures of the run. Optimizer states and pickled training
  arguments stay at home.
- `verify()` loads the folder in a new process that cannot import this package and has no network, and compares its
  outputs with those of the package's own class.
- `push()` uploads what `export()` wrote, and only that.
"""

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import transformers
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from .configuration_dsx_encoder import AUTO_MAP, DsxEncoderConfig
from .model_card import CARD_TEMPLATE, HUB_TASKS, CardFacts, auto_class_of, fill_model_card
from .runs import put_in_place

PACKAGE_DIR = Path(__file__).parent
SHIPPED_FILES = tuple(sorted(path.name for path in PACKAGE_DIR.glob("*_dsx_encoder.py")))
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",
)
# What makes a folder one of sentence-transformers: its description, and a folder for each module behind the encoder.
SENTENCE_FILES = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
SENTENCE_FOLDERS = "[0-9]_[A-Z]*"
EXPORTED_FILES = (
    *SHIPPED_FILES, *WEIGHT_FILES, *TOKENIZER_FILES, *SENTENCE_FILES, SENTENCE_FOLDERS, "config.json", "README.md"
)  # fmt: skip


@dataclass(frozen=True)
class VerifyReport:
    """What a process without the package saw.

    Args:
        architecture: The class that the weights were saved from.
        module: Where that class came from; starts with `transformers_modules`.
        classes: Class found for each entry of the `auto_map`.
        max_difference: Largest difference to the outputs of the package's own class.
        answer: First answer of the task's pipeline, empty where transformers has no such pipeline.
    """

    architecture: str
    module: str
    classes: dict[str, str]
    max_difference: float
    answer: str


def export(
    source: str | Path,
    target: str | Path,
    *,
    tokenizer: str | Path | None = None,
    with_tokenizer: bool = True,
    facts: CardFacts | None = None,
    template: str | Path = CARD_TEMPLATE,
    overwrite: bool = False,
) -> Path:
    """Write a folder that loads anywhere with `trust_remote_code=True`; it appears complete or not at all.

    Args:
        source: Folder with a config and safetensors weights, as `save_pretrained` and Trainer write it.
        target: Folder to make.
        tokenizer: Folder of the tokenizer, if `source` has none.
        with_tokenizer: False for a model that reads no text, or whose tokenizer is elsewhere.
        facts: What to say on the model card.
        template: Jinja template of the model card.
        overwrite: Whether to replace an earlier export at `target`.
    """
    source, target = Path(source), Path(target)
    config = _read_config(source)
    check_target(source, target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _copy(source, unfinished, WEIGHT_FILES, "weights", "save the model with `save_pretrained` first")
        if with_tokenizer:
            copy_tokenizer(Path(tokenizer or source), unfinished, config.max_position_embeddings)
        _copy(PACKAGE_DIR, unfinished, SHIPPED_FILES, "shipped code", "reinstall the package")
        # A config that was loaded from the Hub points at the code there; this folder brings its own.
        config.auto_map = dict(AUTO_MAP)
        config.save_pretrained(unfinished)
        card = fill_model_card(unfinished, facts or CardFacts(), run=source, name=target.name, template=template)
        (unfinished / "README.md").write_text(f"{card}\n", encoding="utf-8")
        check_target(source, target, overwrite)  # what came there meanwhile is not ours
        put_in_place(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _read_config(folder: Path) -> DsxEncoderConfig:
    """Return the config of a saved model, or say what the folder is instead."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"source={str(folder)!r} holds no config.json: give a folder that `save_pretrained` wrote.")
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("model_type") != DsxEncoderConfig.model_type:
        raise ValueError(
            f"source={str(folder)!r} has model_type={found.get('model_type')!r}, and only "
            f"{DsxEncoderConfig.model_type!r} can be exported: convert the checkpoint first."
        )
    if not found.get("architectures"):
        raise ValueError(
            f"source={str(folder)!r} has a config without `architectures`, so that nobody knows which class its "
            "weights belong to: save the model with `model.save_pretrained`, not the config alone."
        )
    return DsxEncoderConfig.from_pretrained(folder)


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse a target that is the source, holds it, or holds what no export wrote.

    Raises:
        ValueError: Naming both folders, or the file in the way.
    """
    if source.resolve() == target.resolve() or target.resolve() in source.resolve().parents:
        raise ValueError(f"target={str(target)!r} holds source={str(source)!r}: name another folder.")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise ValueError(
            f"target={str(target)!r} exists: name a new folder, or replace it by overwrite=True (--overwrite true)."
        )
    strangers = [path.name for path in target.iterdir() if not any(path.match(name) for name in EXPORTED_FILES)]
    if strangers:
        raise ValueError(
            f"target={str(target)!r} holds {strangers[0]!r}, which no export wrote, and overwrite=True would delete "
            "it: name a new folder."
        )


def _copy(source: Path, target: Path, patterns: tuple[str, ...], what: str, way_out: str) -> None:
    paths = [path for pattern in patterns for path in sorted(source.glob(pattern))]
    if not paths:
        raise ValueError(f"source={str(source)!r} holds no {what} ({', '.join(patterns)}): {way_out}.")
    for path in paths:
        shutil.copyfile(path, target / path.name)


def copy_tokenizer(source: Path, target: Path, max_length: int) -> None:
    """Copy a tokenizer's files and cap its longest input at the model's.

    Raises:
        ValueError: There is none, or it needs code of its own.
    """
    _copy(source, target, TOKENIZER_FILES, "tokenizer", "name the tokenizer's folder with `tokenizer=`")
    path = target / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if "auto_map" in values:
        raise ValueError(
            f"tokenizer={str(source)!r} needs code of its own (`auto_map`), which does not ship: use a tokenizer that "
            "transformers loads by itself, such as `PreTrainedTokenizerFast`."
        )
    # A wrapped tokenizer says 1e30, and `truncation=True` would cut nothing.
    if values.get("model_max_length", max_length + 1) > max_length:
        values["model_max_length"] = max_length
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _probe(package: str, folder: str, auto_class: str, task: str, exchange: str) -> None:
    """Load a folder as a stranger does: alone in another process, to which this source is handed, imports and all."""
    import json
    import sys

    class Refuse:
        """The package may be installed here; a module of the same name inside `transformers_modules` may load."""

        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}")

    sys.meta_path.insert(0, Refuse())
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    classes = {name: get_class_from_dynamic_module(ref, folder) for name, ref in config.auto_map.items()}
    model, loading = getattr(transformers, auto_class).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    save_file({"output": model(**load_file(f"{exchange}/inputs"))[0].contiguous()}, f"{exchange}/outputs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answer = ""
    if task in ("text-classification", "token-classification", "fill-mask", "feature-extraction"):
        pipeline = transformers.pipeline(task, model=model, tokenizer=tokenizer)
        answer = str(pipeline(f"好 good {tokenizer.mask_token if task == 'fill-mask' else ''}")[:1])
    report = {
        "module": type(model).__module__,
        "classes": {name: found.__name__ for name, found in classes.items()},
        "loading": {name: sorted(map(str, keys)) for name, keys in loading.items() if keys},
        "answer": answer[:200],
    }
    with open(f"{exchange}/report", "w", encoding="utf-8") as file:
        json.dump(report, file)


def verify(folder: str | Path, *, tolerance: float = 1e-5) -> VerifyReport:
    """Load an exported folder in a process without this package, offline, and compare the outputs.

    Args:
        folder: What `export()` wrote.
        tolerance: Largest difference of an output to that of the package's own class.
    """
    folder = Path(folder).resolve()
    config = _read_config(folder)
    auto_class = auto_class_of(config)
    with tempfile.TemporaryDirectory() as exchange:
        inputs = _probe_inputs(config, auto_class)
        save_file(inputs, f"{exchange}/inputs")
        source = f"{inspect.getsource(_probe)}\nimport sys\n_probe(*sys.argv[1:])\n"
        arguments = [__package__, str(folder), auto_class, HUB_TASKS[auto_class], exchange]
        done = subprocess.run(
            [sys.executable, "-I", "-c", source, *arguments],
            cwd=exchange,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{exchange}/modules"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ValueError(
                f"folder={str(folder)!r} does not load without the package: {done.stderr.strip()[-1500:]}\n"
                "Export it again with `export()`, and look for what it lacks in the lines above."
            )
        report = json.loads(Path(exchange, "report").read_text(encoding="utf-8"))
        outputs = load_file(f"{exchange}/outputs")["output"]
    model = getattr(transformers, auto_class).from_pretrained(folder)
    with torch.no_grad():
        difference = (model(**inputs)[0] - outputs).abs().max().item()
    if report["loading"] or not difference <= tolerance:  # not <=: a NaN must fail too
        raise ValueError(
            f"folder={str(folder)!r} loads without the package, but not as it was: difference {difference:.3g} (at "
            f"most {tolerance:g}), {report['loading'] or 'all keys found'}. Export it again from the run's folder."
        )
    return VerifyReport(config.architectures[0], report["module"], report["classes"], difference, report["answer"])


def _probe_inputs(config: DsxEncoderConfig, auto_class: str) -> dict[str, torch.Tensor]:
    """Return a small batch with padding, of the ids that every vocabulary has."""
    shape = (2, 2, 8) if auto_class == "AutoModelForMultipleChoice" else (2, 8)  # (B, L) or (B, choices, L)
    input_ids = torch.arange(prod(shape)).reshape(shape) % config.vocab_size
    attention_mask = torch.ones(shape, dtype=torch.long)
    attention_mask[-1, ..., 5:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def push(folder: str | Path, repo_id: str, *, private: bool = True, message: str = "Upload the model") -> str:
    """Upload an exported folder and return its address; needs `hf auth login` once.

    Args:
        folder: What `export()` wrote.
        repo_id: `user/name` on the Hub; made if it does not exist.
        private: Whether a new repository is visible to its owner only.
        message: Commit message.
    """
    folder = Path(folder)
    missing = [name for name in ("config.json", "README.md", *SHIPPED_FILES) if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"folder={str(folder)!r} lacks {', '.join(missing)}: write it with `export()` first.")
    hub = HfApi()
    hub.create_repo(repo_id, private=private, exist_ok=True)
    done = hub.upload_folder(
        folder_path=folder,
        repo_id=repo_id,
        commit_message=message,
        allow_patterns=[*EXPORTED_FILES, f"{SENTENCE_FOLDERS}/*"],
    )
    return str(done.commit_url)
