"""The verifier's language model as its files describe it, whatever it is wrapped in."""

import re
from collections.abc import Iterable
from typing import Any

from spec_compat.patching import trusts_remote_code
from spec_compat.wrappers import text_config

# Modules of decoder layers hold embeddings and heads of their own (multi-token prediction).
LAYER = re.compile(r"(^|\.)layers\.\d")


def language_config(auto: Any, verifier: str) -> Any:
    """The config of the language model, as transformers' own class where it has one.

    `auto` is transformers' AutoConfig. A class that comes with the verifier says nothing to
    transformers' models, and vLLM does without it too.
    """
    import transformers

    written, _ = transformers.PretrainedConfig.get_config_dict(verifier)
    text = text_config(written)
    if "auto_map" in written or "auto_map" in text:
        for name in text.get("architectures") or ():
            if known := getattr(transformers, name, None):
                return known.config_class.from_dict(text)
    config = auto.from_pretrained(verifier, trust_remote_code=trusts_remote_code())
    found = config.get_text_config()
    if not hasattr(found, "rms_norm_eps"):
        # 0.4 makes a norm with it before it is given the verifier's own.
        found.rms_norm_eps = getattr(found, "layer_norm_eps", 1e-5)
    return found


def named(wanted: str, names: Iterable[str]) -> str | None:
    """The tensor that a plain decoder would call `wanted`: `model.norm.weight`, `lm_head.weight`.

    Under a wrapper, names have something before it, or within it. Raises ValueError when more than
    one tensor could be meant.
    """
    *_, module, kind = wanted.split(".")
    names = list(names)
    found = [n for n in names if n.split(".")[-2:] == [module, kind] and not LAYER.search(n)]
    if module != "lm_head":
        decoders = {n.rpartition("embed_tokens.")[0] for n in names if "embed_tokens." in n}
        found = [n for n in found if n.removesuffix(f"{module}.{kind}") in decoders]
    if len(found) > 1:
        raise ValueError(f"{wanted} may be any of {', '.join(sorted(found))}")
    return found[0] if found else None
