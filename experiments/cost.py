"""What training costs: pure arithmetic on shapes and counts.

Per adapted N_in x N_out matrix and token, a full training step takes 3 N_in N_out multiply-adds
(forward, gradient of the input, gradient of the weight); LoRA skips the weight's gradient and pays
3 R (N_in + N_out) for its factors (the post, "Compute efficiency"). Attention scores and element-wise
work are left out, as there.
"""

from __future__ import annotations


def full_flops(num_matrix_parameters: int, num_tokens: int) -> float:
    """Training FLOPs (2 per multiply-add) of full fine-tuning: 6 N D."""
    return 6.0 * num_matrix_parameters * num_tokens


def lora_flops(num_matrix_parameters: int, num_adapter_parameters: int, num_tokens: int) -> float:
    """Training FLOPs of LoRA: 4 N D for the frozen weights, 6 per adapter parameter and token."""
    return (4.0 * num_matrix_parameters + 6.0 * num_adapter_parameters) * num_tokens
