// What functions of Python's are made of: they take objects as Python's builtins do (`METH_FASTCALL`), which takes a tenth of
// what ctypes takes. Their callers hold Python's lock.

#pragma once

#include <Python.h>

#include <cstdint>
#include <initializer_list>
#include <span>

namespace {

template <typename Function>
PyMethodDef method(const char* name, Function* function, int flags = METH_FASTCALL) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr};
}

// What Python passes: a number that is none is 0, and `PyErr_Occurred` tells.
template <typename T>
T* pointer(PyObject* number) {
  return static_cast<T*>(PyLong_AsVoidPtr(number));
}

// Of a list or a tuple.
std::span<PyObject* const> items(PyObject* sequence) {
  return {PySequence_Fast_ITEMS(sequence), static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence))};
}

// Something of C++'s as an object of Python's, that owns it.
template <typename T>
PyObject* own(T* owned) {
  PyObject* capsule = PyCapsule_New(owned, nullptr, [](PyObject* self) { delete static_cast<T*>(PyCapsule_GetPointer(self, nullptr)); });
  if (capsule == nullptr) delete owned;
  return capsule;
}

template <typename T>
T& owned(PyObject* capsule) {
  return *static_cast<T*>(PyCapsule_GetPointer(capsule, nullptr));
}

// Methods of such an object, in a tuple, which own it; the reference is taken over. Null where an error is set.
template <size_t N>
PyObject* bind(PyObject* self, PyMethodDef (&methods)[N]) {
  PyObject* bound = PyErr_Occurred() ? nullptr : PyTuple_New(N);
  for (size_t i = 0; bound != nullptr && i < N; ++i) {
    PyObject* builtin = PyCFunction_NewEx(&methods[i], self, nullptr);
    if (builtin == nullptr) {
      Py_CLEAR(bound);
    } else {
      PyTuple_SET_ITEM(bound, i, builtin);
    }
  }
  Py_DECREF(self);
  return bound;
}

// A module of Python's, of the functions of its files.
PyObject* make_module(const char* name, std::initializer_list<PyMethodDef*> files) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, name, nullptr, -1, nullptr};
  PyObject* module = PyModule_Create(&definition);
  for (PyMethodDef* functions : files) {
    if (module != nullptr && PyModule_AddFunctions(module, functions) != 0) Py_CLEAR(module);
  }
  return module;
}

}  // namespace
