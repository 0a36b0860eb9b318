"""Boundary to accelerate: weights, gradients and moments of one run, sharded over its processes with FSDP2.

FSDP2 (``fully_shard``) and not FSDP1: transformers drops the latter with version 5.20, and FSDP2 shards each parameter
by itself, so that frozen and trained ones of an adapted layer need no rule about how they are flattened together.
The gradient is the sum over the processes, as ``sft.Trainer.compute_loss`` divides by the tokens of the whole batch.
Storage and communication are fp32 as in one process; bf16 is autocast and nothing else.
"""

from __future__ import annotations

from typing import Any

from accelerate import PartialState
from accelerate.state import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from experiments import ranks


def arguments() -> dict[str, Any]:
    """What a Trainer is told. A checkpoint holds whole tensors, so that its weights are a model or an adapter that
    other programs load."""
    if ranks.count() == 1:
        return {}
    return {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}


def declare() -> None:
    """Have accelerate shard on CPUs too, called before its Accelerator is made.

    It does so for each kind of accelerator that it knows and for CPUs not, where FSDP2 works as well: our processes
    say that they are one of those. The device and the communication stay the CPU's.
    """
    if ranks.count() > 1 and PartialState().distributed_type is DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def keep_precision(plugin: Any) -> None:
    """Nothing is cast to fewer bits for FSDP's sake, called before the model is sharded."""
    plugin.mixed_precision_policy = MixedPrecisionPolicy()


def sum_gradients(model: nn.Module) -> None:
    """Gradients are summed over processes, not averaged (gloo could not), called once the model is sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
