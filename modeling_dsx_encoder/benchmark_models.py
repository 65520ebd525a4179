"""The competitors of the benchmark: equal depth, width and heads, and layers of about equally many parameters.

- `dsx`: this encoder, Pre-LN with a gated feed-forward and no biases
- `bert`: stock `BertModel`, SDPA, without its pooling layer
- `modernbert`: stock `ModernBertModel`, SDPA
- `onnxruntime`: that same BERT in ONNX Runtime, inference only, in the fastest of several exported forms

Weights are new: speed does not depend on what they say. In a case of real weights `dsx` is what that BERT became by
conversion, Post-LN and biases and all, and both have BERT's pooling layer.
"""

import contextlib
import logging
import time
import warnings
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, ModernBertConfig, ModernBertModel, PreTrainedModel

from .benchmark_cases import FIRST_WORD, SLIDING_WINDOW, VOCAB_SIZE, Case
from .configuration_dsx_encoder import DsxEncoderConfig
from .modeling_dsx_encoder import DsxEncoderModel

LABELS = {
    "dsx": "DSX encoder",
    "bert": "BERT",
    "modernbert": "ModernBERT",
    "onnxruntime": "BERT, ONNX Runtime",
    "bound": "bare matrix products",
}
PARAMETER_TOLERANCE = 0.02


def gated_size(hidden_size: int) -> int:
    """Inner width of a gated feed-forward whose layer has as many parameters as BERT's: a multiple of 8.

    BERT's layer has 12 E^2 + 13 E parameters, the gated one without biases 4 E^2 + 3 E F + 4 E.
    """
    return 8 * round((8 * hidden_size + 9) / 3 / 8)


def dsx_config(case: Case, dropout: float = 0.0, position_embedding_type: str = "learned") -> DsxEncoderConfig:
    """This encoder in the shape of a case; token types and the table of positions are those of BERT."""
    layer_types = case.layer_types()
    return DsxEncoderConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=case.shape.hidden_size,
        num_hidden_layers=case.shape.num_layers,
        num_attention_heads=case.shape.num_heads,
        intermediate_size=gated_size(case.shape.hidden_size),
        position_embedding_type=position_embedding_type,
        max_position_embeddings=max(512, case.texts.longest),
        type_vocab_size=2,
        layer_types=layer_types,
        sliding_window=SLIDING_WINDOW if "sliding_attention" in layer_types else None,
        embedding_dropout=dropout,
        attention_dropout=dropout,
        hidden_dropout=dropout,
    )


def bert_config(case: Case, dropout: float = 0.0) -> BertConfig:
    """Stock BERT: full attention in every layer."""
    return BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=case.shape.hidden_size,
        num_hidden_layers=case.shape.num_layers,
        num_attention_heads=case.shape.num_heads,
        intermediate_size=4 * case.shape.hidden_size,
        max_position_embeddings=max(512, case.texts.longest),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def modernbert_config(case: Case, dropout: float = 0.0) -> ModernBertConfig:
    """Stock ModernBERT with the same kinds of layers as this encoder."""
    return ModernBertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=case.shape.hidden_size,
        num_hidden_layers=case.shape.num_layers,
        num_attention_heads=case.shape.num_heads,
        intermediate_size=gated_size(case.shape.hidden_size),
        max_position_embeddings=max(512, case.texts.longest),
        layer_types=case.layer_types(),
        local_attention=2 * SLIDING_WINDOW,
        embedding_dropout=dropout,
        attention_dropout=dropout,
        mlp_dropout=dropout,
        pad_token_id=0,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
    )


def build_model(
    name: str,
    case: Case,
    dropout: float = 0.0,
    position_embedding_type: str = "learned",
    seed: int = 0,
    folders: dict[str, Path] | None = None,
):
    """A competitor with new weights, or those of its folder, in train mode if the case trains."""
    torch.manual_seed(seed)
    if folders is not None:
        model_class = DsxEncoderModel if name == "dsx" else BertModel
        model = model_class.from_pretrained(folders[name], attn_implementation="sdpa")
    elif name == "dsx":
        config = dsx_config(case, dropout, position_embedding_type)
        model = DsxEncoderModel._from_config(config, attn_implementation="sdpa")
    elif name == "modernbert":
        model = ModernBertModel._from_config(modernbert_config(case, dropout), attn_implementation="sdpa")
    else:
        config = bert_config(case, dropout)
        config._attn_implementation = "sdpa"
        model = BertModel(config, add_pooling_layer=False)
    return model.train(case.mode == "training")


def count_parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Number of parameters in the layers, and in the whole model."""
    layers = model.encoder.layer if isinstance(model, BertModel) else model.layers
    return tuple(sum(parameter.numel() for parameter in part.parameters()) for part in (layers, model))


def check_parameters(models: dict[str, PreTrainedModel]) -> dict[str, int]:
    """Numbers of parameters in the layers; refuses competitors that are not about equally large."""
    counts = {name: count_parameters(model)[0] for name, model in models.items()}
    for name, count in counts.items():
        reference = counts.get("bert", count)
        if abs(count - reference) > PARAMETER_TOLERANCE * reference:
            raise ValueError(
                f"the layers of {name} have {count} parameters, those of bert {reference}: a comparison allows "
                f"{PARAMETER_TOLERANCE:.0%}; choose a wider shape, where intermediate_size can be matched"
            )
    return counts


class TorchCompetitor:
    """A PyTorch model and its step: a forward, or a forward and a backward."""

    def __init__(self, model: PreTrainedModel, case: Case, device: str = "cpu"):
        self.model = model.to(device)
        self.training = case.mode == "training"
        self.autocast = case.precision == "bf16"
        self.device = device
        generator = torch.Generator().manual_seed(0)
        # A loss that pulls towards something: the mean square of a normed output has gradients of about 0.
        self.target = torch.randn(case.shape.hidden_size, generator=generator).to(device)

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Last hidden states `(B, L, E)`, or the loss over real tokens, whose gradients are made."""
        # Entered anew each time, as the Trainer does: casts of weights are part of a step.
        autocast = torch.autocast(self.device, torch.bfloat16) if self.autocast else contextlib.nullcontext()
        if not self.training:
            with torch.inference_mode(), autocast:
                return self.model(**batch).last_hidden_state
        self.model.zero_grad(set_to_none=True)
        with autocast:
            hidden_states = self.model(**batch).last_hidden_state  # (B, L, E)
        mask = batch["attention_mask"][..., None]
        loss = ((hidden_states.float() - self.target) * mask).square().sum() / (mask.sum() * self.target.numel())
        loss.backward()
        return loss.detach()


class OnnxCompetitor:
    """An exported BERT in ONNX Runtime on CPU, with all optimisations of its graph."""

    def __init__(self, path: str | Path, num_threads: int):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        # Its threads go on spinning for a while after a run, which the next competitor would pay for.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def step(self, batch: dict[str, torch.Tensor]):
        """Last hidden states `(B, L, E)` as a NumPy array."""
        return self.session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})[0]


class _HiddenStates(torch.nn.Module):
    """What is exported: two inputs, one output."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids, attention_mask=attention_mask).last_hidden_state


@contextlib.contextmanager
def quiet():
    """Without the exporters' remarks on operators that no competitor has."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def export_onnx(model: BertModel, folder: str | Path) -> dict[str, Path]:
    """Exports a BERT in several forms, each with free batch and length: which one is fastest differs by machine.

    "traced" and "dynamo" are the two exporters of PyTorch, "fused" is the traced one after ONNX Runtime's own
    optimiser for BERT (fused attention, GELU and layer norm).
    """
    from onnxruntime.transformers import optimizer

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wrapped = _HiddenStates(model).eval()
    # Attention in plain operators is what the optimiser of ONNX Runtime knows and fuses.
    model.set_attn_implementation("eager")
    names, result = ["input_ids", "attention_mask"], "last_hidden_state"
    example = torch.full((2, 16), FIRST_WORD), torch.ones(2, 16, dtype=torch.long)
    axes = {0: "batch", 1: "length"}
    shapes = {name: dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for name in names}
    forms = {
        "traced": {"dynamo": False, "dynamic_axes": dict.fromkeys([*names, result], axes)},
        "dynamo": {"dynamo": True, "dynamic_shapes": shapes, "verbose": False},
    }
    paths = {form: folder / f"{form}.onnx" for form in (*forms, "fused")}
    with quiet(), torch.no_grad():
        for form, options in forms.items():
            torch.onnx.export(wrapped, example, paths[form], input_names=names, output_names=[result], **options)
        heads, width = model.config.num_attention_heads, model.config.hidden_size
        traced = str(paths["traced"])
        fused = optimizer.optimize_model(traced, model_type="bert", num_heads=heads, hidden_size=width, opt_level=1)
        fused.save_model_to_file(str(paths["fused"]))
    model.set_attn_implementation("sdpa")
    return paths


def check_onnx(competitor: OnnxCompetitor, model: BertModel, batch: dict[str, torch.Tensor]) -> float:
    """Largest difference from the PyTorch model at real tokens; refuses one that matters."""
    with torch.inference_mode():
        expected = model(**batch).last_hidden_state
    difference = torch.from_numpy(competitor.step(batch)) - expected
    worst = difference.abs()[batch["attention_mask"].bool()].max().item()
    if not worst <= 1e-4:
        raise ValueError(
            f"the ONNX export of BERT is {worst:.1e} off the PyTorch model, more than 1e-4: not comparable"
        )
    return worst


def fastest_onnx(
    paths: dict[str, Path], model: BertModel, batches: list[dict[str, torch.Tensor]], num_threads: int
) -> tuple[str, OnnxCompetitor]:
    """Checks every exported form against PyTorch and gives the fastest, by the best of three passes in turns."""
    sessions = {form: OnnxCompetitor(path, num_threads) for form, path in paths.items()}
    for session in sessions.values():
        check_onnx(session, model, batches[0])
    best = dict.fromkeys(sessions, float("inf"))
    for _ in range(3):
        for form, session in sessions.items():
            start = time.perf_counter()
            session.step(batches[0])
            best[form] = min(best[form], time.perf_counter() - start)
    form = min(best, key=best.get)
    return form, sessions[form]
