// The parts of the module leapahead._native; _native.pyi has their types.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

template <typename T>
using Matrix = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::device::cpu>;  // of rows that are contiguous

// The columns that each row has in memory, of which k count.
inline size_t width(const Matrix<int64_t> &following, const Matrix<double> &logits, size_t rows, int k) {
    if (following.shape(0) != rows || logits.shape(0) != rows || following.shape(1) < static_cast<size_t>(k) ||
        logits.shape(1) < static_cast<size_t>(k) || following.stride(1) != 1 || logits.stride(1) != 1 ||
        (rows > 1 && following.stride(0) != logits.stride(0)))
        throw nanobind::value_error("tokens and logits must be [rows, k], of one layout in memory");
    return rows > 1 ? static_cast<size_t>(following.stride(0)) : following.shape(1);
}

void bind_suffix_automaton(nanobind::module_ &m);
void bind_acceptance(nanobind::module_ &m);
void bind_sources(nanobind::module_ &m);
void bind_search(nanobind::module_ &m);
