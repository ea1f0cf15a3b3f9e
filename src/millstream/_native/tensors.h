// Where PyTorch's tensors are in Python's.

#pragma once

#include <c10/core/TensorImpl.h>

#include "module.h"

namespace {

using Implementation = c10::TensorImpl;

// A Python tensor is a pointer to its implementation, which torch.utils.swap_tensors exchanges.
using Place = Implementation* const*;

// Of a tensor, and the offset of that pointer in bytes.
Place place_of(PyObject* tensor, size_t offset) { return reinterpret_cast<Place>(reinterpret_cast<char*>(tensor) + offset); }

}  // namespace
