// The module of what needs Python's C API and nothing else: one of it serves every version of PyTorch.

#include "module.h"

extern PyMethodDef of_collector[], of_conversions[], of_copies[], of_recorder[];

PyMODINIT_FUNC PyInit_core() { return make_module("core", {of_collector, of_conversions, of_copies, of_recorder}); }
