"""Plain single-device models, their losses and their first values. They import nothing of ours.

Owns `nn.Module`s without any parallelism in them; knows no preset, no mesh and no data.
"""

from meshwright.models.build import build_model
from meshwright.models.gpt import GPT, GPTConfig
from meshwright.models.initial import Initial, draw, draw_into, initialise
from meshwright.models.llama import Llama, LlamaConfig
from meshwright.models.loss import IGNORED_LABEL, classification_loss, language_model_loss
from meshwright.models.mlp import MLP, MLPConfig

__all__ = [
    "GPT",
    "IGNORED_LABEL",
    "MLP",
    "GPTConfig",
    "Initial",
    "Llama",
    "LlamaConfig",
    "MLPConfig",
    "build_model",
    "classification_loss",
    "draw",
    "draw_into",
    "initialise",
    "language_model_loss",
]
