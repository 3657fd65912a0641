"""A micro-batch of a step, without a trainer around it."""

from torch import Tensor

from train.data.batch import Batch
from train.step import Plan, Step


def accumulate(step: Step, batch: Batch, plan: Plan) -> Tensor:
    """Add its gradients, as `Trainer.train_step` does; return its `counts`."""
    step.sync(batch.last)
    output = step.forward(batch, plan)
    step.backward(output)
    return output.counts
