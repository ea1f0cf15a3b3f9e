"""Running a plan, always with the same results: ``serial``, ``graph`` as one CUDA graph, ``streams`` without one."""

from millstream.engine.build import ENGINES, Engine, Executable, build
from millstream.engine.captured import Family
from millstream.engine.choice import Scheduling
from millstream.engine.cuda_graph import CudaGraphEngine
from millstream.engine.serial import SerialEngine
from millstream.engine.streams import StreamsEngine

__all__ = [
    "ENGINES",
    "CudaGraphEngine",
    "Engine",
    "Executable",
    "Family",
    "Scheduling",
    "SerialEngine",
    "StreamsEngine",
    "build",
]
