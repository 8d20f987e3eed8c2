"""Flex attention without a compiler is slow, and torch warns that its backward may be wrong.

Symptom  An epoch over 6,500 tokens takes 25 s on a CPU; a UserWarning of flex_attention.
Cause    Uncompiled flex attention materialises every intermediate of the score function.
Fix      Without an accelerator the block mask is evaluated once into a dense boolean mask, and
         torch's own scaled_dot_product_attention does the rest: the same values to 1e-6, forward
         and backward.
Remove when speculators trains on CPUs with dense attention itself.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from spec_compat.patching import Patch, without_accelerator

patch = Patch(module="speculators.models.eagle3.attention", when={"speculators": ">=0.3,<0.5"})


patch.probe(without_accelerator)


@patch.replace("flex_attention")
def flex_attention(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    torch = module.torch

    def attention(
        query: Any,
        key: Any,
        value: Any,
        *,
        block_mask: Any,
        enable_gqa: bool,
        scale: Any,
        score_mod: None = None,
    ) -> Any:
        """query, key, value: [1, heads, tokens, head_dim]; returns the query's shape.

        Another argument is a TypeError, and so is a `score_mod`: it would be left out.
        """
        if score_mod is not None:
            raise TypeError("dense attention knows no score_mod")
        zero = torch.zeros((), dtype=torch.long)
        queries = torch.arange(query.shape[2])[:, None]
        keys = torch.arange(key.shape[2])[None, :]
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=block_mask.mask_mod(zero, zero, queries, keys),
            enable_gqa=enable_gqa,
            scale=scale,
        )

    return attention
