"""Any encoder of a known family becomes a DSX folder, with its error printed; and a DSX folder becomes stock again.

`convert` loads the source, moves its weights, writes a folder that loads anywhere, loads that folder back and runs
both models on one padded batch. The target appears complete and checked, or not at all; the source is only read.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import hub
from .building import SPECIAL_IDS
from .bundled import BUNDLED
from .conversion_models import dsx_class, to_dsx_model, to_stock_model
from .conversion_report import TOLERANCE, ConversionReport, compare
from .conversion_source import LoadedModel, SentenceModules, load_model, load_tokenizer, open_source
from .families import Family, find_family
from .model_card import CardFacts
from .runs import put_in_place


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to_family: str | None = None,
    head: str | None = None,
    allow_pickle: bool = False,
    trim_vocabulary: list[str] | None = None,
    text_column: str = "text",
    text_pair_column: str | None = None,
    overwrite: bool = False,
    tolerance: float = TOLERANCE,
) -> ConversionReport:
    """Write a DSX folder of a stock checkpoint or, with `to_family`, a stock folder of a DSX checkpoint.

    Args:
        source: Folder, id on the Hub, or name of an encoder that an installed package carries.
        target: Folder to make.
        to_family: `model_type` of the stock family to go back to.
        head: "base" or a head's name, where not the class that the weights were saved from is wanted.
        allow_pickle: Whether old .bin files may be read; they can run code.
        trim_vocabulary: Files of texts; pieces that they do not use are taken out of tokenizer and table.
        text_column: Column of those texts, where the files have columns.
        text_pair_column: Column of second texts.
        overwrite: Whether to replace an earlier conversion at `target`.
        tolerance: Largest difference of an output, relative to its largest value where that is above 1.

    Raises:
        ValueError: Anything that keeps the target from computing what the source computes; nothing is written then.
    """
    target = Path(target)
    family = None if to_family is None else find_family(to_family)
    _check_places(Path(source), target, overwrite)
    with _workplace(target) as place:
        root = open_source(source, place, allow_pickle=allow_pickle)
        modules = SentenceModules(root)
        loaded = load_model(modules.encoder_folder, head=head, allow_pickle=allow_pickle)
        _check_direction(loaded.model, family, str(source))
        tokenizer = load_tokenizer(modules.encoder_folder)
        trim = None
        if trim_vocabulary:
            columns = {"text_column": text_column, "text_pair_column": text_pair_column}
            trim, tokenizer = _trim(loaded.model, tokenizer, trim_vocabulary, modules.prompts, columns)
        finished = place / target.name
        facts = _facts(root, str(source), loaded.model.config.model_type)
        report = _convert_loaded(loaded, tokenizer, family, finished, facts)
        report.source, report.target, report.trim = str(source), str(target), trim
        modules.copy(finished, allow_pickle)
        if modules.modules:
            report.notes.append("modules of sentence-transformers carried along: open it with SentenceTransformer")
        report.check(tolerance)
        _check_places(Path(source), target, overwrite)  # what came there meanwhile is not ours
        put_in_place(finished, target)
    return report


@contextmanager
def _workplace(target: Path) -> Iterator[Path]:
    """A folder on the target's own disk that is gone afterwards, whatever happens."""
    target.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _check_places(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse a target from which the source would change."""
    if source.resolve() in target.resolve().parents:
        raise ValueError(f"target={str(target)!r} lies inside source={str(source)!r}, which is only read: move it.")
    hub.check_target(source, target, overwrite)


def _check_direction(model: PreTrainedModel, family: Family | None, source: str) -> None:
    is_dsx = model.config.model_type == "dsx_encoder"
    if is_dsx and family is None:
        raise ValueError(f"source={source!r} is a DSX checkpoint already: name the way back by --to-family.")
    if not is_dsx and family is not None:
        raise ValueError(
            f"source={source!r} is a {model.config.model_type} checkpoint, and to_family={family.name!r} is the way "
            "back from a DSX one: leave --to-family out to make one."
        )


def _trim(model, tokenizer, files: list[str], prompts: list[str], columns: dict[str, str | None]):
    """The vocabulary that texts use, in the model and in a new tokenizer."""
    from .vocabulary import read_texts, trim_vocabulary

    if tokenizer is None:
        raise ValueError("trim_vocabulary needs the tokenizer, and the source has none: add its files.")
    report = trim_vocabulary(model, tokenizer, read_texts(files, **columns), prompts=prompts)
    return report, report.tokenizer


def _facts(root: Path, source: str, model_type: str) -> CardFacts:
    """What the card says of the weights: where they come from, and the licence and languages that stand there."""
    name = root.name if Path(source).is_dir() else source
    facts = CardFacts(languages=[], license="", converted_from=f"the {model_type} checkpoint {name}")
    if not Path(source).is_dir() and source not in BUNDLED:
        facts.base_model = source  # an id on the Hub
    if (root / "README.md").is_file():
        # Cards of others may have fields that no rule of the Hub allows; they are not ours to check.
        data = ModelCard.load(root / "README.md", ignore_metadata_errors=True).data
        facts.license = data.license if isinstance(data.license, str) else ""
        languages = [data.language] if isinstance(data.language, str) else data.language or []
        facts.languages = [str(language) for language in languages]
        facts.base_model = data.base_model if isinstance(data.base_model, str) else facts.base_model
    return facts


def _convert_loaded(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    family: Family | None,
    folder: Path,
    facts: CardFacts,
) -> ConversionReport:
    """Convert a model, write it to `folder`, load that back and compare."""
    source, notes = loaded.model, []
    if family is None:
        pooler = not any("pooler" in key for key in loaded.fresh)
        converted, name, moved = to_dsx_model(source, pooler=pooler, **_token_ids(source, tokenizer))
        _write_dsx(converted, tokenizer, folder, facts)
        stock, ours = source, dsx_class(name).from_pretrained(folder, dtype=torch.float32)
        if not pooler and not name:
            source.base_model.pooler = None
            loaded.fresh = [key for key in loaded.fresh if "pooler" not in key]
            notes.append("the source has no pooler, so the target has none (add_pooling_layer=False)")
    else:
        converted, name, moved = to_stock_model(source, family)
        _write_stock(converted, tokenizer, folder, source.config.max_position_embeddings)
        options = {}
        if getattr(converted, "pooler", converted) is None:
            options["add_pooling_layer"] = False
            notes.append("without a pooler: load it with add_pooling_layer=False, or transformers makes a random one")
        stock, ours = type(converted).from_pretrained(folder, dtype=torch.float32, **options), source
    if family is None and any("pooler" in key for key in (*loaded.unknown, *moved.dropped)):
        notes.append("the source's pooler is left out, as a masked LM has none: --head base keeps it for fine-tuning")
    return ConversionReport(
        source="",
        target="",
        family=stock.config.model_type,
        source_class=type(source).__name__,
        target_class=type(converted).__name__,
        dtype=str(converted.dtype).removeprefix("torch."),
        num_parameters=converted.num_parameters(),
        differences=compare(stock, ours, name),
        unknown=loaded.unknown,
        fresh=loaded.fresh,
        dropped=moved.dropped,
        differing=moved.differing,
        notes=notes + ([] if tokenizer is not None else ["the source has no tokenizer, so the target has none"]),
    )


def _token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int]:
    """Ids that the tokenizer knows and the stock configuration does not say."""
    if tokenizer is None:
        return {}
    ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS if getattr(model.config, name, None) is None}
    ids.pop("pad_token_id", None)  # what the model computes with may hang on it
    return {name: value for name, value in ids.items() if value is not None and value < model.config.vocab_size}


def _write_dsx(model: PreTrainedModel, tokenizer, folder: Path, facts: CardFacts) -> None:
    saved = folder.with_name(f"{folder.name}.saved")
    model.save_pretrained(saved)
    if tokenizer is not None:
        tokenizer.save_pretrained(saved)
    hub.export(saved, folder, facts=facts, with_tokenizer=tokenizer is not None)
    shutil.rmtree(saved)


def _write_stock(model: PreTrainedModel, tokenizer, folder: Path, max_length: int) -> None:
    model.save_pretrained(folder)
    if tokenizer is not None:
        saved = folder.with_name(f"{folder.name}.saved")
        tokenizer.save_pretrained(saved)
        hub.copy_tokenizer(saved, folder, max_length)
        shutil.rmtree(saved)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors makes files that only their owner may read
