"""Running a plan, all with the same results: ``serial``, ``threads`` (CPU), ``graph`` (one CUDA graph), ``streams``."""

from millstream.engine.assembly import OneOfMany, build, check_devices
from millstream.engine.by_size import BySize
from millstream.engine.cuda.captured import ProgramPair
from millstream.engine.cuda.cuda_graph import CudaGraphEngine
from millstream.engine.engine import Engine
from millstream.engine.host.serial_engine import SerialEngine
from millstream.engine.host.streams_engine import StreamsEngine
from millstream.engine.improving import Improving
from millstream.engine.parallel.agreed import AgreedEngine
from millstream.engine.placed.placed_program import find_constraints

__all__ = [
    "AgreedEngine",
    "BySize",
    "CudaGraphEngine",
    "Engine",
    "Improving",
    "OneOfMany",
    "ProgramPair",
    "SerialEngine",
    "StreamsEngine",
    "build",
    "check_devices",
    "find_constraints",
]
