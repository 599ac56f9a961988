// What the C++ of every program begins with, and its kernels.
#pragma once
#include <torch/csrc/inductor/cpp_wrapper/cpu.h>
#include <torch/csrc/inductor/cpp_prefix.h>
