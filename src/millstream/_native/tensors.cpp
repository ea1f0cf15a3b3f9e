// The module of what looks into PyTorch's tensors and switches in every call: each version of PyTorch has its own.

#include <Python.h>

#include <initializer_list>

extern PyMethodDef of_batches[], of_guards[], of_switches[];

PyMODINIT_FUNC PyInit_tensors() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tensors", nullptr, -1, nullptr};
  PyObject* module = PyModule_Create(&definition);
  for (PyMethodDef* functions : {of_batches, of_guards, of_switches}) {
    if (module != nullptr && PyModule_AddFunctions(module, functions) != 0) Py_CLEAR(module);
  }
  return module;
}
