"""PyTorch programs → flat FX graphs: models by Dynamo, whole training steps by tracing with lifted state."""

from millstream.capture.step import Fallback, Step
from millstream.capture.step_graph import Build, StepGraph

__all__ = ["Build", "Fallback", "Step", "StepGraph"]
