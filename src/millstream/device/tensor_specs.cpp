// Whether tensors look like those before, without Python's 50 ns for each property of each tensor.
//
// Contract
// - `millstream_compare` gives 1 only if every item of the list is a tensor that may be treated as the one it stands for:
//   of the same kind (layout, subclass, laziness: all that PyTorch dispatches by), device, dtype, sizes, strides and
//   demand for a gradient; and if no two of them share a storage. 0 means no more than: let Python look.
// - It takes Python's objects as its builtins do (`METH_FASTCALL`): the address of the specs, the list, and the address of a
//   place for the items' addresses.
// - The caller holds Python's lock.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

#include <c10/core/TensorImpl.h>

namespace {

using Implementation = c10::TensorImpl;

struct Look {
  explicit Look(const Implementation& tensor)
      : kind(tensor.key_set()),
        device(tensor.device()),
        dtype(tensor.dtype()),
        requires_grad(tensor.requires_grad()),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()) {}

  bool fits(const Implementation& tensor) const {
    return tensor.key_set() == kind && tensor.device() == device && tensor.dtype() == dtype && tensor.requires_grad() == requires_grad &&
           tensor.sizes() == c10::IntArrayRef(sizes) && tensor.strides() == c10::IntArrayRef(strides);
  }

  c10::DispatchKeySet kind;
  c10::Device device;
  caffe2::TypeMeta dtype;
  bool requires_grad;
  std::vector<int64_t> sizes, strides;
};

struct TensorSpecs {
  const Implementation& implementation(PyObject* tensor) const {
    return **reinterpret_cast<const Implementation* const*>(reinterpret_cast<const char*>(tensor) + place);
  }

  PyTypeObject* type;
  size_t place;  // of the pointer to the implementation in a Python tensor, in bytes
  std::vector<Look> tensors;
  std::vector<const void*> storages;  // of the batch compared last, sorted
};

bool compare(TensorSpecs& specs, PyObject* leaves, uint64_t* addresses) {
  size_t count = specs.tensors.size();
  if (static_cast<size_t>(PyList_GET_SIZE(leaves)) != count) return false;
  for (size_t i = 0; i < count; ++i) {
    PyObject* leaf = PyList_GET_ITEM(leaves, i);
    if (Py_TYPE(leaf) != specs.type) return false;
    const Implementation& tensor = specs.implementation(leaf);
    if (!specs.tensors[i].fits(tensor)) return false;
    const auto* begin = static_cast<const char*>(tensor.storage().data());
    specs.storages[i] = begin;
    addresses[i] = reinterpret_cast<uint64_t>(begin) + tensor.storage_offset() * tensor.dtype().itemsize();
  }
  std::sort(specs.storages.begin(), specs.storages.end());
  return std::adjacent_find(specs.storages.begin(), specs.storages.end()) == specs.storages.end();
}

}  // namespace

extern "C" {

TensorSpecs* millstream_make(PyTypeObject* type, size_t place) { return new TensorSpecs{type, place, {}, {}}; }

void millstream_drop(TensorSpecs* specs) { delete specs; }

// Gives 0 for what it cannot compare others with.
int millstream_add(TensorSpecs* specs, PyObject* tensor) {
  try {
    specs->tensors.emplace_back(specs->implementation(tensor));
    specs->storages.push_back(nullptr);
    return Py_TYPE(tensor) == specs->type;
  } catch (const std::exception&) {  // a tensor without sizes
    return 0;
  }
}

PyObject* millstream_compare(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* specs = static_cast<TensorSpecs*>(PyLong_AsVoidPtr(arguments[0]));
  auto* addresses = static_cast<uint64_t*>(PyLong_AsVoidPtr(arguments[2]));
  if (PyErr_Occurred()) return nullptr;
  try {
    return PyBool_FromLong(compare(*specs, arguments[1], addresses));
  } catch (const std::exception&) {  // a tensor without memory
    Py_RETURN_FALSE;
  }
}

}  // extern "C"
