"""Code that travels with the miniature: the config of the wrapper."""

from transformers.configuration_utils import PretrainedConfig

from .configuration_deepseek import DeepseekV3Config


class KimiK25VisionConfig(PretrainedConfig):
    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(
        self, text_config=None, vision_config=None, media_placeholder_token_id=163605, **fields
    ):
        print("a word from the model's own code")
        self.text_config = DeepseekV3Config(**(text_config or {}))
        self.vision_config = KimiK25VisionConfig(**(vision_config or {}))
        self.media_placeholder_token_id = media_placeholder_token_id
        super().__init__(**fields)
