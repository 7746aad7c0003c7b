// A fake of NVRTC (libnvrtc.so), for tests on machines without CUDA: it compiles nothing. Its
// "cubin" is a mark and the text of the options, which the fake driver (cuda.cpp) takes for a
// module with the kernels of those types. Never a GPU result.

#include <cstring>
#include <string>

#include "export.h"

enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

struct Program {
    std::string source, log, cubin, ptx;
};

namespace {

const int architectures[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

int give_size(const Program* program, std::string Program::*field, size_t terminator, size_t* size) {
    if (!program) return INVALID_PROGRAM;
    return *size = (program->*field).size() + terminator, SUCCESS;
}

int give(const Program* program, std::string Program::*field, size_t terminator, char* out) {
    if (!program) return INVALID_PROGRAM;
    std::memcpy(out, (program->*field).c_str(), (program->*field).size() + terminator);
    return SUCCESS;
}

}  // namespace

EXPORT int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, SUCCESS; }

EXPORT const char* nvrtcGetErrorString(int code) {
    switch (code) {
        case SUCCESS: return "NVRTC_SUCCESS";
        case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
        case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case COMPILATION: return "NVRTC_ERROR_COMPILATION";
        default: return "NVRTC_ERROR unknown";
    }
}

EXPORT int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*, const char* const*) {
    if (!program || !source) return INVALID_INPUT;
    return *program = new Program{source, {}, {}, {}}, SUCCESS;
}

EXPORT int nvrtcDestroyProgram(Program** program) {
    if (!program || !*program) return INVALID_PROGRAM;
    delete *program;
    return *program = nullptr, SUCCESS;
}

/// Fails as the real one does where the text is no kernel or an option is none.
EXPORT int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    if (!program) return INVALID_PROGRAM;
    std::string text, architecture;
    for (int i = 0; i < count; ++i) {
        std::string option = options[i];
        if (option.empty() || option[0] != '-') return program->log = "unrecognized option " + option, INVALID_OPTION;
        for (std::string name : {"--gpu-architecture=", "-arch="})
            if (option.compare(0, name.size(), name) == 0) architecture = option.substr(name.size());
        text += option + "\n";
    }
    if (program->source.find("__global__") == std::string::npos) return program->log = "error: no kernel in the source", COMPILATION;
    if (architecture.compare(0, 3, "sm_") == 0) program->cubin = "\x7f" "ELF flow fake\n" + text;
    program->ptx = "// flow fake\n" + text;
    return SUCCESS;
}

EXPORT int nvrtcGetProgramLogSize(Program* program, size_t* size) { return give_size(program, &Program::log, 1, size); }

EXPORT int nvrtcGetProgramLog(Program* program, char* out) { return give(program, &Program::log, 1, out); }

EXPORT int nvrtcGetCUBINSize(Program* program, size_t* size) {
    return give_size(program, &Program::cubin, program && !program->cubin.empty(), size);
}

EXPORT int nvrtcGetCUBIN(Program* program, char* out) {
    return give(program, &Program::cubin, program && !program->cubin.empty(), out);
}

EXPORT int nvrtcGetPTXSize(Program* program, size_t* size) { return give_size(program, &Program::ptx, 1, size); }

EXPORT int nvrtcGetPTX(Program* program, char* out) { return give(program, &Program::ptx, 1, out); }

EXPORT int nvrtcGetNumSupportedArchs(int* count) { return *count = int(std::size(architectures)), SUCCESS; }

EXPORT int nvrtcGetSupportedArchs(int* out) { return std::memcpy(out, architectures, sizeof architectures), SUCCESS; }
