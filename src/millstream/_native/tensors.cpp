// The module of what looks into PyTorch's tensors and switches in every call: each version of PyTorch has its own.

#include "module.h"

extern PyMethodDef of_batches[], of_guards[], of_switches[];

PyMODINIT_FUNC PyInit_tensors() { return make_module("tensors", {of_batches, of_guards, of_switches}); }
