"""Learning: rows in, better weights out. Packed forward, optimizer, checkpoints, precision."""

from upswing.learn.learner import Learner, frozen_copy
from upswing.learn.metrics import Mean, UpdateMetrics
from upswing.learn.options import RLOptions
from upswing.learn.precision import native_bf16
from upswing.learn.rows import TrainRow
from upswing.learn.schedule import Schedule

__all__ = ["Learner", "Mean", "RLOptions", "Schedule", "TrainRow", "UpdateMetrics", "frozen_copy", "native_bf16"]
