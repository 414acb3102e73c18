// The parts of the module leapahead._native; _native.pyi has their types.
#pragma once

#include <nanobind/nanobind.h>

void bind_suffix_automaton(nanobind::module_ &m);
void bind_acceptance(nanobind::module_ &m);
void bind_sources(nanobind::module_ &m);
void bind_search(nanobind::module_ &m);
