// A batch's tensors in one call each: from Python every property takes 50 ns, and to make a tensor most of a microsecond.
//
// Contract
// - `compare` gives true only if every item of the list is a tensor that may be treated as the one it stands for:
//   of the same kind (layout, subclass, laziness: all that PyTorch dispatches by), device, dtype, sizes, strides and
//   demand for a gradient; and if no two of them share a storage. False means no more than: let Python look.
// - It takes the list, and the address of a place for the items' addresses.
// - `prepare_segment` looks at how a segment is to be lent, once: its address and length, whether it lies on a device of CUDA's and
//   on which, where a Python tensor has its implementation, and of each leaf its place in the batch, a tensor of its type, its sizes,
//   strides and first element. It gives a capsule of Python's. Nothing of the memory is kept alive by it.
// - `lend_segment` takes that capsule, an owner, and a list for the batch's leaves, into which it puts those of the segment. They
//   share a storage of their own over the memory, which keeps the owner until the last of them is gone, and lets it go in whatever
//   thread that is. They are no views in the sense of autograd: each has its own version counter. So does `lend_tensor`.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>

#include "tensors.h"

// Of PyTorch's library for Python, whose own header takes long to compile.
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

// --- tensors that look like those before

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
    const Implementation& tensor = **place_of(leaf, specs.place);
    if (!specs.tensors[i].fits(tensor)) return false;
    const auto* begin = static_cast<const char*>(tensor.storage().data());
    specs.storages[i] = begin;
    addresses[i] = reinterpret_cast<uint64_t>(begin) + tensor.storage_offset() * tensor.dtype().itemsize();
  }
  std::sort(specs.storages.begin(), specs.storages.end());
  return std::adjacent_find(specs.storages.begin(), specs.storages.end()) == specs.storages.end();
}

PyObject* compare_specs(PyObject* self, PyObject* const* arguments, Py_ssize_t) {
  auto* addresses = pointer<uint64_t>(arguments[1]);
  if (PyErr_Occurred()) return nullptr;
  try {
    return PyBool_FromLong(compare(owned<TensorSpecs>(self), arguments[0], addresses));
  } catch (const std::exception&) {  // a tensor without memory
    Py_RETURN_FALSE;
  }
}

PyMethodDef specs_methods[] = {method("compare", compare_specs)};

// Of the class of tensors, where one has its implementation, and some tensors in a list. Gives what compares others with
// them, in a tuple; a ValueError where it cannot.
PyObject* make_specs(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  auto* type = reinterpret_cast<PyTypeObject*>(arguments[0]);
  auto* specs = new TensorSpecs{type, PyLong_AsSize_t(arguments[1]), {}, {}};
  PyObject* self = own(specs);
  if (self == nullptr) return nullptr;
  bool are_plain = true;
  try {
    for (PyObject* tensor : items(arguments[2])) {
      are_plain &= Py_TYPE(tensor) == type;
      specs->tensors.emplace_back(**place_of(tensor, specs->place));
      specs->storages.push_back(nullptr);
    }
  } catch (const std::exception&) {  // a tensor without sizes
    are_plain = false;
  }
  if (!are_plain) PyErr_SetString(PyExc_ValueError, "These leaves are beyond the compiled code.");
  return bind(self, specs_methods);
}

// --- tensors over a buffer's memory

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

void let_go(void* owner) {
  if (!Py_IsInitialized()) return;
  PyGILState_STATE state = PyGILState_Ensure();
  Py_DECREF(static_cast<PyObject*>(owner));
  PyGILState_Release(state);
}

Numbers numbers(PyObject* tuple) {
  Numbers found;
  for (PyObject* each : items(tuple)) found.push_back(PyLong_AsLongLong(each));
  return found;
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

PyObject* prepare_segment(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  void* data = PyLong_AsVoidPtr(arguments[0]);
  size_t num_bytes = PyLong_AsSize_t(arguments[1]);
  auto index = static_cast<c10::DeviceIndex>(PyLong_AsLong(arguments[2]));  // below 0 for the host's
  size_t place = PyLong_AsSize_t(arguments[3]);
  PyObject* leaves = arguments[4];
  try {
    c10::Device device = index < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, index);
    auto* segment = new Segment{data, num_bytes, device, {}};
    PyObject* self = own(segment);
    for (PyObject* each : items(leaves)) {
      auto leaf = items(each);
      segment->leaves.push_back({PyLong_AsSsize_t(leaf[0]), (*place_of(leaf[1], place))->dtype(), numbers(leaf[2]),
                                 numbers(leaf[3]), PyLong_AsLongLong(leaf[4])});
    }
    if (PyErr_Occurred()) Py_CLEAR(self);
    return self;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyObject* lend_segment(PyObject*, PyObject* const* arguments, Py_ssize_t) {
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

// Of where a tensor has its implementation, a tensor, and an owner: a tensor of the same form over the same memory.
PyObject* lend_tensor(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  try {
    const Implementation& memory = **place_of(arguments[1], PyLong_AsSize_t(arguments[0]));
    size_t num_bytes = at::detail::computeStorageNbytes(memory.sizes(), memory.strides(), memory.itemsize());
    Segment segment{const_cast<void*>(memory.data()), num_bytes, memory.device(), {}};
    Leaf leaf{0, memory.dtype(), memory.sizes().vec(), memory.strides().vec(), 0};
    return make_tensor(make_storage(segment, arguments[2]), leaf);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // namespace

PyMethodDef of_batches[] = {
    method("make_specs", make_specs),
    method("prepare_segment", prepare_segment),
    method("lend_segment", lend_segment),
    method("lend_tensor", lend_tensor),
    {},
};
