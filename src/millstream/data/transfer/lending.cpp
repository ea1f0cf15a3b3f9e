// The tensors of a batch over a buffer's memory, made in one call: from Python each takes several, and most of a microsecond.
//
// Contract
// - `millstream_prepare` looks at how a segment is to be lent, once: its address and length, whether it lies on a device of CUDA's and
//   on which, where a Python tensor has its implementation, and of each leaf its place in the batch, a tensor of its type, its sizes,
//   strides and first element. It gives a capsule of Python's. Nothing of the memory is kept alive by it.
// - `millstream_lend` takes that capsule, an owner, and a list for the batch's leaves, into which it puts those of the segment. They
//   share a storage of their own over the memory, which keeps the owner until the last of them is gone, and lets it go in whatever
//   thread that is. They are no views in the sense of autograd: each has its own version counter.
// - Both take Python's objects as its builtins do (`METH_FASTCALL`), with Python's lock held, and raise its errors.

#include <Python.h>

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include <ATen/core/TensorBase.h>

// Of PyTorch's library for Python, whose own header takes long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

using Numbers = std::vector<int64_t>;

struct Leaf {
  Py_ssize_t place;
  caffe2::TypeMeta dtype;
  Numbers sizes, strides;
  int64_t first;
};

struct Segment {
  void* data;
  size_t num_bytes;
  c10::Device device;
  std::vector<Leaf> leaves;
};

void drop(PyObject* capsule) { delete static_cast<Segment*>(PyCapsule_GetPointer(capsule, nullptr)); }

void let_go(void* owner) {
  if (!Py_IsInitialized()) return;
  PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(static_cast<PyObject*>(owner));
  PyGILState_Release(state);
}

Numbers numbers(PyObject* tuple) {
  Numbers found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
  return found;
}

caffe2::TypeMeta type_of(PyObject* tensor, size_t place) {
  return (*reinterpret_cast<const c10::TensorImpl* const*>(reinterpret_cast<const char*>(tensor) + place))->dtype();
}

c10::Storage make_storage(const Segment& segment, PyObject* owner) {
  Py_INCREF(owner);
  c10::DataPtr pointer(segment.data, owner, let_go, segment.device);
  return c10::Storage(c10::Storage::use_byte_size_t(), segment.num_bytes, std::move(pointer));
}

PyObject* make_tensor(const c10::Storage& storage, const Leaf& leaf) {
  c10::DispatchKeySet kind(storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  auto tensor = c10::make_intrusive<c10::TensorImpl, c10::UndefinedTensorImpl>(c10::Storage(storage), kind, leaf.dtype);
  tensor->set_sizes_and_strides(leaf.sizes, leaf.strides, leaf.first);
  return THPVariable_Wrap(at::TensorBase(std::move(tensor)));
}

}  // namespace

extern "C" {

PyObject* millstream_prepare(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  void* data = PyLong_AsVoidPtr(arguments[0]);
  size_t num_bytes = PyLong_AsSize_t(arguments[1]);
  auto index = static_cast<c10::DeviceIndex>(PyLong_AsLong(arguments[2]));  // below 0 for the host's
  size_t place = PyLong_AsSize_t(arguments[3]);
  PyObject* leaves = arguments[4];
  try {
    c10::Device device = index < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, index);
    auto* segment = new Segment{data, num_bytes, device, {}};
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves); ++i) {
      PyObject* leaf = PyList_GET_ITEM(leaves, i);
      segment->leaves.push_back({PyLong_AsSsize_t(PyTuple_GET_ITEM(leaf, 0)), type_of(PyTuple_GET_ITEM(leaf, 1), place),
                                numbers(PyTuple_GET_ITEM(leaf, 2)), numbers(PyTuple_GET_ITEM(leaf, 3)),
                                PyLong_AsLongLong(PyTuple_GET_ITEM(leaf, 4))});
    }
    PyObject* capsule = PyErr_Occurred() ? nullptr : PyCapsule_New(segment, nullptr, drop);
    if (capsule == nullptr) delete segment;
    return capsule;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* millstream_lend(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* segment = static_cast<const Segment*>(PyCapsule_GetPointer(arguments[0], nullptr));
  if (segment == nullptr) return nullptr;
  try {
    c10::Storage storage = make_storage(*segment, arguments[1]);
    for (const Leaf& leaf : segment->leaves) {
      PyObject* tensor = make_tensor(storage, leaf);
      if (tensor == nullptr || PyList_SetItem(arguments[2], leaf.place, tensor) != 0) return nullptr;
    }
    Py_RETURN_NONE;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // extern "C"
