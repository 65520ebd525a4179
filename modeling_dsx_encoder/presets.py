"""Presets: `configuration/models/<name>.json`, each a valid config.json with only what differs from the defaults.

`load_preset` makes a `DsxEncoderConfig` of one; a key that no field has is refused, with the nearest known name.
"""

import dataclasses
import difflib
import json
import os
from pathlib import Path
from typing import Any

from .configuration_dsx_encoder import DsxEncoderConfig

CONFIGURATION_FOLDER = Path(__file__).resolve().parents[1] / "configuration"


def nearest(name: str, known: Any) -> str:
    """Says which known name a misspelt one may mean, or lists them all where nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known names: {', '.join(sorted(known))}"


def known_config_keys() -> set[str]:
    """Names that a preset may hold: the fields of the configuration and the literature's aliases."""
    fields = {field.name for field in dataclasses.fields(DsxEncoderConfig)}
    # The last two stand in config.json files that `save_pretrained` wrote, beside the fields.
    return fields | set(DsxEncoderConfig.attribute_map) | {"num_labels", "auto_map", "use_cache"}


def preset_path(name_or_path: str | os.PathLike) -> Path:
    """Finds a preset by name, by path of its file, or by the folder that holds a config.json."""
    path = Path(name_or_path)
    for candidate in (CONFIGURATION_FOLDER / "models" / f"{name_or_path}.json", path / "config.json", path):
        if candidate.is_file():
            return candidate
    names = sorted(file.stem for file in (CONFIGURATION_FOLDER / "models").glob("*.json"))
    raise ValueError(
        f"preset {str(name_or_path)!r} is neither a name in configuration/models nor a file: "
        + (nearest(str(name_or_path), names) if names else "give the path of a config.json")
    )


def load_preset(name_or_path: str | os.PathLike, **overrides: Any) -> DsxEncoderConfig:
    """Builds a configuration from a preset; a key that no field has is refused, in the file and in `overrides`."""
    path = preset_path(name_or_path)
    values = json.loads(path.read_text(encoding="utf-8"))
    model_type = values.pop("model_type", DsxEncoderConfig.model_type)
    if model_type != DsxEncoderConfig.model_type:
        raise ValueError(
            f"{path.name} has model_type {model_type!r}, but a preset of this package has "
            f"{DsxEncoderConfig.model_type!r}: load foreign configurations with AutoConfig"
        )
    aliases = DsxEncoderConfig.attribute_map
    merged = {aliases.get(key, key): value for key, value in values.items()}
    merged |= {aliases.get(key, key): value for key, value in overrides.items()}
    known = known_config_keys()
    for key in merged:
        if key not in known:
            raise ValueError(
                f"preset {path.name} or its overrides have the unknown key {key!r}: {nearest(key, known)}"
            )
    return DsxEncoderConfig(**merged)
