"""DSX encoder: public names; importing registers them with transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_dsx_encoder import DsxEncoderConfig
from .modeling_dsx_encoder import (
    DsxEncoderForMaskedLM,
    DsxEncoderForMultipleChoice,
    DsxEncoderForQuestionAnswering,
    DsxEncoderForSequenceClassification,
    DsxEncoderForTokenClassification,
    DsxEncoderModel,
    DsxEncoderPreTrainedModel,
)

__all__ = [
    "DsxEncoderConfig",
    "DsxEncoderForMaskedLM",
    "DsxEncoderForMultipleChoice",
    "DsxEncoderForQuestionAnswering",
    "DsxEncoderForSequenceClassification",
    "DsxEncoderForTokenClassification",
    "DsxEncoderModel",
    "DsxEncoderPreTrainedModel",
]

# `register` lets the Auto classes find these here; `register_for_auto_class` makes save_pretrained copy the code.
AutoConfig.register(DsxEncoderConfig.model_type, DsxEncoderConfig, exist_ok=True)
DsxEncoderConfig.register_for_auto_class()
for _auto_class, _model_class in (
    (AutoModel, DsxEncoderModel),
    (AutoModelForMaskedLM, DsxEncoderForMaskedLM),
    (AutoModelForSequenceClassification, DsxEncoderForSequenceClassification),
    (AutoModelForTokenClassification, DsxEncoderForTokenClassification),
    (AutoModelForQuestionAnswering, DsxEncoderForQuestionAnswering),
    (AutoModelForMultipleChoice, DsxEncoderForMultipleChoice),
):
    _auto_class.register(DsxEncoderConfig, _model_class, exist_ok=True)
    _model_class.register_for_auto_class(_auto_class.__name__)
