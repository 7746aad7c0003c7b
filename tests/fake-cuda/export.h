// How the fakes export a function, and one function under a second name.

#pragma once

#define EXPORT extern "C" __attribute__((visibility("default")))
#define ALSO(name, function) EXPORT __attribute__((alias(#function))) decltype(function) name
