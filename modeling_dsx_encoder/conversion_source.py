"""Where a conversion starts: a folder, an id of the Hub, or an encoder of an installed package; only ever read.

- `open_source`: its files on this machine
- `load_model`: the class that its weights belong to, with a list of what the file has too much or too little
- `SentenceModules`: what makes the folder one of sentence-transformers
"""

import copy
import functools
import json
import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .building import naming_source
from .conversion_models import dsx_class, head_name
from .families import HEAD_NAMES, find_family
from .hub import SENTENCE_FILES, TOKENIZER_FILES

logger = logging.getLogger(__name__)

# "*" also stands for folders here: modules of sentence-transformers come along.
HUB_FILES = ("*.json", "*.txt", "*.model", "*.safetensors", "README.md")
HUB_LEFT_OUT = ("onnx/*", "openvino/*", "tf_model*", "*.onnx")
PICKLES = ("*.bin", "*.pt", "*.pth")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEADLESS = "base"  # what the command line calls the trunk alone


@dataclass
class LoadedModel:
    """A model and what its file told.

    Args:
        model: In eval mode, in the dtype of the file.
        unknown: Keys of the file for which the class has no place.
        fresh: Keys of the class that the file does not have; their values are random.
    """

    model: PreTrainedModel
    unknown: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)


def open_source(source: str | Path, place: Path, *, allow_pickle: bool = False) -> Path:
    """The folder of a source: itself, or a copy from the Hub's cache, or what a package carries, unpacked in `place`.

    Raises:
        ValueError: It is none of these, or the Hub cannot be reached.
    """
    if Path(source).is_dir():
        return Path(source)
    from .bundled import BUNDLED, unpack

    if str(source) in BUNDLED:
        return unpack(str(source), place / "unpacked")
    patterns = [*HUB_FILES, *(PICKLES if allow_pickle else ())]
    with naming_source("source", str(source)):
        return Path(snapshot_download(str(source), allow_patterns=patterns, ignore_patterns=list(HUB_LEFT_OUT)))


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of a checkpoint, by transformers and this package alone.

    Raises:
        ValueError: There is none, or it is of a model that needs code of its own.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"source={str(folder)!r} holds no config.json: give a folder that `save_pretrained` wrote.")
    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if model_type == "dsx_encoder":
        return AutoConfig.from_pretrained(folder)
    family = find_family(model_type or "")  # names the families
    # Code that the folder brings along stays unread, and what only that code computes is refused by its fields here,
    # before a class is looked for and weights are read; without a class, as another head may be asked for.
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    headless = copy.deepcopy(config)
    headless.architectures = None
    family.to_dsx(headless)
    return config


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, or None where it has no file of one."""
    if not any(path for name in TOKENIZER_FILES for path in folder.glob(name)):
        return None
    return AutoTokenizer.from_pretrained(folder)


def wants_safetensors(folder: Path, allow_pickle: bool) -> bool:
    """Whether the weights are safetensors; pickles only with leave.

    Raises:
        ValueError: Only pickles without leave, or no weights at all.
    """
    if any(folder.glob("*.safetensors")):
        return True
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if not pickles:
        raise ValueError(f"source={str(folder)!r} holds no weights (*.safetensors): give a folder with a saved model.")
    if not allow_pickle:
        raise ValueError(
            f"source={str(folder)!r} has its weights in {pickles[0]!r}, and such a file can run any code while it is "
            "read: allow it by --allow-pickle if you trust whoever made it, or save it as safetensors first."
        )
    logger.warning("reading %s, which could run code of whoever made it", folder / pickles[0])
    return False


def choose_class(config: PreTrainedConfig, head: str | None) -> type[PreTrainedModel]:
    """The class to load: that of `architectures`, or the one of the head asked for.

    Raises:
        ValueError: An unknown head, or a class without counterpart.
    """
    if head is not None and head != HEADLESS and head not in HEAD_NAMES:
        raise ValueError(f"head={head!r} is unknown: {HEADLESS}, {', '.join(filter(None, HEAD_NAMES))}.")
    name = "" if head == HEADLESS else head
    architecture = (config.architectures or [None])[0]
    if config.model_type == "dsx_encoder":
        return dsx_class(head_name(architecture) if name is None and architecture else name or "")
    family = find_family(config.model_type)
    if name is not None:
        return family.stock_class(family.heads[name])
    return family.stock_class(family.find_head(architecture)[1] if architecture else family.heads[""])


def file_dtype(folder: Path) -> torch.dtype | str:
    """The dtype that holds every weight of the safetensors files as it is; config.json may say a narrower one.

    Without such files "auto", by which transformers decides.

    Raises:
        ValueError: A file that is damaged or cut off.
    """
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"source={str(folder)!r} has a damaged file, {path.name} ({error}): copy or download it again."
            ) from error
    dtypes = [DTYPES[name] for name in found if name in DTYPES]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else "auto"


def load_model(folder: Path, *, head: str | None = None, allow_pickle: bool = False) -> LoadedModel:
    """Load a checkpoint whole, in its own dtype.

    Args:
        folder: With config.json and weights, one file or shards.
        head: "base" or the name of a head, where not the class that the weights were saved from is wanted.
        allow_pickle: Whether a pickled file may be read.

    Raises:
        ValueError: Weights that are missing, not allowed, or of another shape or layout than the configuration says.
    """
    config = read_config(folder)
    safe = wants_safetensors(folder, allow_pickle)
    model_class, dtype = choose_class(config, head), file_dtype(folder)
    with naming_source("source", str(folder)):
        model, loading = model_class.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=safe,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    for key, in_file, in_class in sorted(loading["mismatched_keys"]):
        raise ValueError(
            f"{key} has shape {tuple(in_file)} in source={str(folder)!r}, but the configuration there makes it "
            f"{tuple(in_class)}: weights and config.json do not belong together."
        )
    loaded = LoadedModel(model.eval(), sorted(loading["unexpected_keys"]), sorted(loading["missing_keys"]))
    refuse_hollow_trunk(loaded, folder)
    return loaded


def refuse_hollow_trunk(loaded: LoadedModel, folder: Path) -> None:
    """Refuse an encoder of which the file lacks a part; only heads and poolers may be new.

    Raises:
        ValueError: Naming what is missing, and what the file has that the class does not know.
    """
    prefix = "" if loaded.model.base_model is loaded.model else f"{loaded.model.base_model_prefix}."
    lacking = [key for key in loaded.fresh if key.startswith(prefix) and "pooler" not in key]
    if lacking:
        instead = f", and has {shortened(loaded.unknown)}, which it does not know" if loaded.unknown else ""
        raise ValueError(
            f"source={str(folder)!r} lacks {shortened(lacking)} of {type(loaded.model).__name__}{instead}: random "
            "values would stand there. The weights are of another layout than config.json says; give the folder whose "
            "config.json was saved with them."
        )


def shortened(keys: list[str], most: int = 4) -> str:
    """The first keys, and how many more there are."""
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


class SentenceModules:
    """The modules of a sentence-transformers folder, as far as they are files to carry along.

    Args:
        root: A folder; without a modules.json there is nothing to carry.
    """

    def __init__(self, root: Path):
        self.root, path = root, root / "modules.json"
        self.modules = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        for module in self.modules:
            if not module["type"].startswith("sentence_transformers."):
                raise ValueError(
                    f"source={str(root)!r} has the module {module['type']!r} in modules.json, which needs code of its "
                    "own that cannot be carried along: remove modules.json from a copy to convert the encoder alone."
                )
            self._check_place(module)

    def _check_place(self, module: dict) -> None:
        """Refuse a module that lies outside the folder, or in the encoder's place without being the encoder."""
        place, root = (self.root / module["path"]).resolve(), self.root.resolve()
        is_encoder = module["type"].endswith(".Transformer")
        if not place.is_relative_to(root) or (place == root and not is_encoder):
            raise ValueError(
                f"source={str(self.root)!r} has the module {module['type']!r} at path={module['path']!r} in "
                "modules.json; a module lies in a folder of its own inside the source, only a Transformer in it: "
                "correct a copy, or remove its modules.json to convert the encoder alone."
            )

    @property
    def encoder_folder(self) -> Path:
        """Where the encoder lies: older folders keep it in one of its own."""
        paths = [module["path"] for module in self.modules if module["type"].endswith(".Transformer")]
        return self.root / paths[0] if paths else self.root

    @property
    def prompts(self) -> list[str]:
        """What is put before texts, such as "query: "."""
        path = self.root / "config_sentence_transformers.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return [prompt for prompt in (found.get("prompts") or {}).values() if prompt]

    def copy(self, target: Path, allow_pickle: bool = False) -> None:
        """Write the description and every module but the encoder, which stands in `target` itself.

        Raises:
            ValueError: A module has pickled weights, and there is no leave.
        """
        if not self.modules:
            return
        encoder = self.encoder_folder
        modules = []
        for module in self.modules:
            folder = self.root / module["path"]
            if module["type"].endswith(".Transformer"):
                module = module | {"path": ""}
            elif folder.is_dir():
                if any(folder.glob("*.bin")):
                    wants_safetensors(folder, allow_pickle)
                for path in folder.rglob("*"):
                    if path.is_file():
                        place = target / path.relative_to(self.root)
                        place.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(path, place)  # bytes alone: dates, owners and rights stay behind
            modules.append(module)
        (target / "modules.json").write_text(f"{json.dumps(modules, indent=2)}\n", encoding="utf-8")
        for name in SENTENCE_FILES[1:]:
            for path in (self.root / name, encoder / name):
                if path.is_file():
                    shutil.copyfile(path, target / name)
