// The module of what needs Python's C API and nothing else: one of it serves every version of PyTorch.

#include <Python.h>

#include <initializer_list>

extern PyMethodDef of_conversions[], of_copies[], of_recorder[];

PyMODINIT_FUNC PyInit_core() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "core", nullptr, -1, nullptr};
  PyObject* module = PyModule_Create(&definition);
  for (PyMethodDef* functions : {of_conversions, of_copies, of_recorder}) {
    if (module != nullptr && PyModule_AddFunctions(module, functions) != 0) Py_CLEAR(module);
  }
  return module;
}
