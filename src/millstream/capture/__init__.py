"""PyTorch programs → flat FX graphs: models by Dynamo, whole training steps by tracing with lifted state."""

from millstream.capture.step.graph import Build, StepGraph
from millstream.capture.step.step import Fallback, Step

__all__ = ["Build", "Fallback", "Step", "StepGraph"]
