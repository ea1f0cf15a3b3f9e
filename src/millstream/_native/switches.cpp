// PyTorch's switches, all in one look: Python would take some 6 µs to ask for each.
//
// Contract
// - What `read_switches` gives, as bytes, is another whenever one of the switches of `_torch/modes/switches.py` is.
// - It takes a tuple of dicts and keys in turn, at which Python keeps switches, and a tuple of sets. Where one of the sets is not empty it gives None: let Python look.
// - The caller keeps alive what has ever been found in the dicts.

#include <Python.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <type_traits>
#include <utility>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/tensor/python_tensor.h>

#include "module.h"

namespace {

using at::Float32Backend;
using at::Float32Op;

constexpr std::pair<Float32Backend, Float32Op> kPrecisions[] = {
    {Float32Backend::GENERIC, Float32Op::ALL}, {Float32Backend::CUDA, Float32Op::ALL},
    {Float32Backend::CUDA, Float32Op::MATMUL}, {Float32Backend::CUDA, Float32Op::CONV},
    {Float32Backend::CUDA, Float32Op::RNN},    {Float32Backend::MKLDNN, Float32Op::ALL},
    {Float32Backend::MKLDNN, Float32Op::MATMUL}, {Float32Backend::MKLDNN, Float32Op::CONV},
    {Float32Backend::MKLDNN, Float32Op::RNN},
};

struct Values {
  template <typename T>
  void add(T value) {
    if constexpr (std::is_enum_v<T>) {
      add(static_cast<uint8_t>(value));
    } else {
      std::memcpy(bytes + count, &value, sizeof(T));
      count += sizeof(T);
    }
  }

  char bytes[256];
  size_t count = 0;
};

// Some versions of PyTorch lack some.
template <typename State>
void add_state(Values& values, const State& state) {
  if constexpr (requires { state.get_grad_layout_enforcement_enabled(); }) {
    values.add(state.get_grad_layout_enforcement_enabled());
  }
}

template <typename Context>
void add_context(Values& values, Context& context) {
  values.add(context.deterministicAlgorithms());
  values.add(context.deterministicAlgorithmsWarnOnly());
  values.add(context.deterministicFillUninitializedMemory());
  for (auto [backend, operation] : kPrecisions) values.add(context.float32Precision(backend, operation));
  values.add(context.userEnabledCuDNN());
  values.add(context.benchmarkCuDNN());
  values.add(context.benchmarkLimitCuDNN());
  values.add(context.deterministicCuDNN());
  if constexpr (requires { context.cudnnDepthwiseKernel(); }) values.add(context.cudnnDepthwiseKernel());
  values.add(context.allowFP16ReductionCuBLAS());
  values.add(context.allowBF16ReductionCuBLAS());
  values.add(context.allowFP16AccumulationCuBLAS());
  values.add(context._SMCarveout_EXPERIMENTAL().value_or(-1));
  values.add(context.blasPreferredBackend());
  values.add(context.linalgPreferredBackend());
  values.add(context.getROCmFAPreferredBackend());
  values.add(context.immediateMiopen());
  values.add(context.userEnabledFlashSDP());
  values.add(context.userEnabledMemEfficientSDP());
  values.add(context.userEnabledMathSDP());
  values.add(context.userEnabledCuDNNSDP());
  values.add(context.userEnabledOverrideableSDP());
  values.add(context.allowFP16BF16ReductionMathSDP());
  for (auto backend : context.sDPPriorityOrder()) values.add(backend);
  values.add(context.userEnabledMkldnn());
  values.add(context.deterministicMkldnn());
  values.add(context.userEnabledNNPACK());
  values.add(context.qEngine());
  values.add(context.allowFP16ReductionCPU());
  values.add(c10::typeMetaToScalarType(c10::get_default_dtype()));
  values.add(at::get_num_threads());
  values.add(torch::tensors::get_default_device().type());
}

PyObject* read_switches(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[1]); ++i) {
    if (PySet_GET_SIZE(PyTuple_GET_ITEM(arguments[1], i)) > 0) Py_RETURN_NONE;
  }
  Values values;
  try {
    add_context(values, at::globalContext());
    add_state(values, c10::AutogradState::get_tls_state());
  } catch (const std::exception&) {  // of a value that a later PyTorch has
    Py_RETURN_NONE;
  }
  for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(arguments[0]); i += 2) {
    PyObject* held = PyDict_GetItemWithError(PyTuple_GET_ITEM(arguments[0], i), PyTuple_GET_ITEM(arguments[0], i + 1));
    if (held == nullptr && PyErr_Occurred()) return nullptr;
    values.add(reinterpret_cast<intptr_t>(held));
  }
  return PyBytes_FromStringAndSize(values.bytes, values.count);
}

}  // namespace

PyMethodDef of_switches[] = {
    method("read_switches", read_switches),
    {},
};
