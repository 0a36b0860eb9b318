"""What training costs: pure arithmetic on shapes and counts.

FLOPs. Per adapted N_in x N_out matrix and token, a full training step takes 3 N_in N_out multiply-adds
(forward, gradient of the input, gradient of the weight); LoRA skips the weight's gradient and pays
3 R (N_in + N_out) for its factors (the post, "Compute efficiency"). Attention scores and element-wise
work are left out, as there.

Memory. Full fine-tuning holds 16 bytes a parameter (weight, gradient and AdamW's two moments in fp32, or
weight and gradient in 16 bit beside fp32 masters: the same sum). LoRA holds the frozen weights, and 16 bytes
for each trained parameter. Activations are what autograd saves for the backward pass of a Llama block with a
fused attention: counted tensor by tensor, see ``activation_bytes``. Under autocast it saves the 16-bit copies of the
fp32 weights too, see ``copies_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Dims:
    """Sizes of a decoder. ``ffn`` is the width of the gated feed-forward that one token passes (all active experts)."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


@dataclass(frozen=True)
class Memory:
    """Bytes on the devices of one run, by what holds them."""

    weights: float = 0.0
    copies: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    kv_cache: float = 0.0
    sampler: float = 0.0

    @property
    def fixed(self) -> float:
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.sampler

    @property
    def peak(self) -> float:
        """What is there at one time. Logits are there twice while they are made; keys and values while nothing is
        trained, and a sampler with weights of its own makes do with the room that is left."""
        training = self.copies + self.activations + 2 * self.logits
        return self.fixed + (training if self.sampler else max(training, self.kv_cache))

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


def full_flops(num_matrix_parameters: int, num_tokens: int) -> float:
    """Training FLOPs (2 per multiply-add) of full fine-tuning: 6 N D."""
    return 6.0 * num_matrix_parameters * num_tokens


def lora_flops(num_matrix_parameters: int, num_adapter_parameters: int, num_tokens: int) -> float:
    """Training FLOPs of LoRA: 4 N D for the frozen weights, 6 per adapter parameter and token."""
    return (4.0 * num_matrix_parameters + 6.0 * num_adapter_parameters) * num_tokens


def state_memory(
    num_parameters: int, num_trainable: int, weight_bytes: float, adapter: bool, sampler_bytes: float = 0.0
) -> Memory:
    """What a run holds whatever its batch.

    Args:
        num_parameters: of the base model, embeddings included. num_trainable: of the adapter, or all.
        weight_bytes: per parameter of the base model (4: fp32, 2: 16 bit). An adapter is trained in fp32.
        adapter: whether the trained parameters come on top of the base's.
        sampler_bytes: per parameter of the sampler's own copy of the merged weights; 0 where it has none.
    """
    extra = 4.0 * num_trainable if adapter else 0.0
    masters = 0.0 if adapter or weight_bytes == 4 else 4.0 * num_trainable  # of weights in 16 bit, in fp32
    gradient = 4.0 if adapter else weight_bytes
    return Memory(
        weights=weight_bytes * num_parameters + extra,
        gradients=gradient * num_trainable,
        optimizer=8.0 * num_trainable + masters,
        sampler=sampler_bytes * num_parameters,
    )


def activation_bytes(
    dims: Dims, num_tokens: int, bytes_per_value: float, rank: int = 0, checkpointing: bool = False, mixed: bool = False
) -> float:
    """Bytes that autograd saves between the forward and the backward pass, without the logits.

    Per token and layer: each of the two norms saves its input, its output, which the matrices after it read, and
    (unless its weight is frozen) the normalised values; attention its queries, keys, values, output and one
    log-sum per head; the gated feed-forward both branches, the activated one and their product (4 ffn); each of
    seven adapters ``rank`` values (0: full fine-tuning). With gradient checkpointing a layer keeps its input, and
    one layer at a time is computed again.

    ``mixed``: fp32 weights under bf16 autocast. The norms and what runs past the layers stay in fp32, and each matrix
    that trains (each adapter, the one on the attention's output too) saves a 16-bit copy of its own input.
    """
    width, wide, narrow = dims.width, 4.0 if mixed else bytes_per_value, 2.0 if mixed else bytes_per_value
    norm = (1 if rank else 2) * wide * width
    read = (
        5 * narrow * width + (narrow * dims.num_heads * dims.head_dim if rank else 0) if mixed else 2 * narrow * width
    )
    attention = dims.head_dim * (2 * dims.num_heads + 2 * dims.num_kv_heads) * narrow
    attention += dims.num_heads * (4.0 if mixed else bytes_per_value)
    layer = 2 * norm + read + attention + narrow * (4 * dims.ffn + 7 * rank)
    layers = dims.num_layers * width * wide + layer if checkpointing else dims.num_layers * layer
    return num_tokens * (layers + norm + (0 if mixed and rank else narrow * width))


def copies_bytes(
    num_matrix_parameters: int, num_kept: int, num_trainable: int, adapter: bool, checkpointing: bool = False
) -> float:
    """Bytes of the 16-bit copies of fp32 weights that autocast makes and the backward pass reads again.

    Args:
        num_matrix_parameters: of all matrices but the embedding. num_kept: of one layer's and the unembedding's.
        num_trainable: of the adapter. adapter: whether the matrices themselves are frozen.
        checkpointing: a layer at a time is computed again, and its frozen weights are cast again. Copies of weights
            that train are kept until the forward pass has ended.
    """
    kept = num_kept if checkpointing and adapter else num_matrix_parameters
    return 2.0 * (kept + (num_trainable if adapter else 0))


def logits_bytes(dims: Dims, num_tokens: int) -> float:
    """Bytes of the log-probabilities that the loss saves, in fp32; twice that while they are made."""
    return 4.0 * num_tokens * dims.vocab


def kv_cache_bytes(dims: Dims, num_tokens: int, bytes_per_value: float = 2.0) -> float:
    """Bytes of the keys and values of ``num_tokens`` tokens that a sampler holds at once."""
    return bytes_per_value * 2 * dims.num_layers * dims.num_kv_heads * dims.head_dim * num_tokens


def device_hours(flops: float, peak_flops_per_s: float, utilisation: float) -> float:
    """Hours on one device at a share ``utilisation`` of its peak. Raises ValueError for a share outside (0, 1]."""
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation: {utilisation!r} is not allowed; it must be in (0, 1]")
    return flops / (peak_flops_per_s * utilisation) / 3600
