"""Running a plan: ``serial`` on any device, ``graph`` as one CUDA graph. Both give the same results."""

from millstream.engine.build import ENGINES, Engine, Executable, build
from millstream.engine.cuda_graph import CudaGraphEngine, Family
from millstream.engine.serial import SerialEngine

__all__ = ["ENGINES", "CudaGraphEngine", "Engine", "Executable", "Family", "SerialEngine", "build"]
