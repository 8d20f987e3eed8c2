"""Code that travels with the miniature: the language model's config, a class of its own."""

from transformers.configuration_utils import PretrainedConfig


class DeepseekV3Config(PretrainedConfig):
    model_type = "kimi_k2"

    def __init__(self, vocab_size=163840, hidden_size=7168, num_hidden_layers=61, **fields):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**fields)
