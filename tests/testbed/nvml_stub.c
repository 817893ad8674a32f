/*
 * A stand-in for libnvidia-ml.so.1 on machines without a GPU.
 *
 * It exports the entry points of NVIDIA's C library that a monitoring client calls, with NVIDIA's structure
 * layouts, and answers from a text file, so that an unmodified nvidia-ml-py (`import pynvml`) reads GPUs that
 * are not there. The file is read again on every call: change it and the next reading changes.
 *
 * The file is $GPUSCHED_NVML_FILE, by default /run/gpusched-testbed/nvml/nvml.conf. Lines are `key=value`; `#`
 * starts a comment line; of two lines with one key the last one counts.
 *
 *   driver, nvml, cuda, count     the system's figures
 *   init_error=N                  nvmlInit fails with N (9: driver not loaded); so does a missing file
 *   gpuI.KEY / gpu*.KEY           a figure of GPU I, or of every GPU without its own:
 *     name uuid serial pci        text; pci as 00000000:07:00.0
 *     mem_total mem_used mem_reserved                    bytes
 *     util_gpu util_mem                                  percent
 *     power_mw power_limit_mw energy_mj temp_c           units in the names
 *     energy_rate_mw              added to energy_mj for each second since the machine's start
 *     mig ecc_mode persistence compute_mode              0 or 1 (compute_mode 0..3)
 *     ecc.TYPE.COUNTER            errors; TYPE 0 corrected, 1 uncorrected; COUNTER 0 volatile, 1 aggregate
 *     remapped=CORR,UNC,PENDING,FAILED                   remapped memory rows
 *     clocks_event_reasons        bit mask
 *     pcie_width pcie_width_max pcie_gen pcie_gen_max    lanes, generation
 *     temp_slowdown_c margin_c    the limit, and the degrees that are left to it
 *     field.ID, field.ID.SCOPE    a field value, as an unsigned number (144 and 145 also by `remapped`, the state of
 *                                 NVLink L, 165.L, also by `nvlinks` and `nvlinkL`)
 *     cc_major cc_minor minor     compute capability; /dev/nvidiaMINOR
 *     procs, graphics_procs       pid:bytes,pid:bytes; with MIG pid:bytes:GI
 *     proc_util                   pid:percent,pid:percent
 *     nvlinks=N, nvlinkL=0        number of links; a link that is down
 *     nvlinkL.peer, nvlinkL.peer_type                    PCI address at the far end; 0 GPU, 2 switch
 *     fabric=UUID,CLIQUE,STATE    NVLink domain: 32 hexadecimal digits; state 3 has joined
 *     mig_profile.P=ID;SLICES;COUNT;MEMORY_MIB;SIZE;NAME;START,START...   a GPU instance profile, by NVML's number P
 *     gis=GI:ID:START:SIZE,...    GPU instances: id, profile's id, placement
 *     cis=GI:CI:SLICES:UUID,...   compute instances, in the order of the MIG devices' indices
 *     giN.mem_used                bytes in use in GPU instance N
 *     mig_monitor=0               who asks may not list GPU instances (no access to mig/monitor)
 *     error=N                     every call on this GPU fails with N (15: GPU is lost)
 *     delay_ms=N                  every call on this GPU takes this long
 *     xid=TAG:NUMBER              an Xid; another TAG is another event, for sets that the GPU was registered with before
 *   topo, topo.I.J (I < J)        nearest common ancestor of two GPUs: 0 10 20 30 40 50
 *
 * A key that is not in the file, or a number that is empty, answers NVML_ERROR_NOT_SUPPORTED, as an old board does.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define DEFAULT_FILE "/run/gpusched-testbed/nvml/nvml.conf"
#define MAX_GPUS 64
#define MAX_SLICES 8
#define TEXT 1024

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
};

/* A MIG device is a device handle, too: of GPU instance `gi`, at least 0. A whole GPU has -1. */
typedef struct { int index, gi, ci, slices; char uuid[48]; } Gpu;
static Gpu gpus[MAX_GPUS], migs[MAX_GPUS][MAX_SLICES];
static int init_count;

/* ---- the file ------------------------------------------------------------------------------------------- */

static FILE *open_file(void) {
    const char *path = getenv("GPUSCHED_NVML_FILE");
    return fopen(path ? path : DEFAULT_FILE, "re");
}

/* A driver answers from memory: the file's lines are kept in a table, and read again when the file has changed. */
#define TABLE 8192
static struct { const char *key, *value; } table[TABLE];

static u32 slot_of(const char *key) {
    u32 hash = 5381;
    for (const char *at = key; *at; at++) hash = hash * 33 + (unsigned char)*at;
    u32 slot = hash % TABLE;
    while (table[slot].key && strcmp(table[slot].key, key)) slot = (slot + 1) % TABLE;
    return slot;
}

static void fill_table(FILE *file, size_t size) {
    static char *text;
    free(text);
    memset(table, 0, sizeof table);
    text = malloc(size + 1);
    text[fread(text, 1, size, file)] = 0;
    u32 count = 0;
    char *rest = text;
    for (char *line; (line = strsep(&rest, "\n")) && count < TABLE / 2; count++) {
        char *equals = strchr(line, '=');
        line[strcspn(line, "\r")] = 0;
        if (!equals || *line == '#') continue;
        *equals = 0;
        u32 slot = slot_of(line);
        table[slot].key = line;
        table[slot].value = equals + 1;
    }
}

/* Read the file if it has changed; every call begins with this. */
static int refresh(void) {
    static struct stat known;
    struct stat now;
    const char *path = getenv("GPUSCHED_NVML_FILE");
    if (stat(path ? path : DEFAULT_FILE, &now)) return 0;
    if (now.st_ino == known.st_ino && now.st_size == known.st_size && now.st_dev == known.st_dev &&
        !memcmp(&now.st_mtim, &known.st_mtim, sizeof now.st_mtim)) return 1;
    FILE *file = open_file();
    if (!file || fstat(fileno(file), &known)) return 0;
    fill_table(file, (size_t)known.st_size);
    fclose(file);
    return 1;
}

static int lookup(const char *key, char *out, size_t size) {
    u32 slot = slot_of(key);
    if (!table[slot].key) return 0;
    snprintf(out, size, "%s", table[slot].value);
    return 1;
}

static int copy_text(const char *text, char *out, u32 size) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static int system_text(const char *key, char *out, u32 size) {
    char text[TEXT];
    if (!init_count) return UNINITIALIZED;
    refresh();
    return lookup(key, text, sizeof text) ? copy_text(text, out, size) : NOT_SUPPORTED;
}

static long gpu_number_or(const Gpu *gpu, const char *key, long otherwise) {
    char full[96], text[TEXT];
    snprintf(full, sizeof full, "gpu%d.%s", gpu->index, key);
    if (lookup(full, text, sizeof text)) return strtol(text, NULL, 0);
    snprintf(full, sizeof full, "gpu*.%s", key);
    return lookup(full, text, sizeof text) ? strtol(text, NULL, 0) : otherwise;
}

static int is_whole(const Gpu *gpu) { return gpu >= gpus && gpu < gpus + MAX_GPUS; }
static int is_mig(const Gpu *gpu) { return gpu >= migs[0] && gpu < migs[MAX_GPUS]; }

/* Is this a handle we gave out, and is the GPU well? Every call on a GPU begins here. */
static int check(const Gpu *gpu) {
    if (!init_count) return UNINITIALIZED;
    if (!is_whole(gpu) && !is_mig(gpu)) return INVALID_ARGUMENT;
    refresh();
    long delay_ms = gpu_number_or(gpu, "delay_ms", 0);
    if (delay_ms > 0) usleep((useconds_t)delay_ms * 1000);
    return (int)gpu_number_or(gpu, "error", SUCCESS);
}

static int gpu_raw(const Gpu *gpu, const char *key, char *out, size_t size) {
    char full[96];
    int result = check(gpu);
    if (result) return result;
    snprintf(full, sizeof full, "gpu%d.%s", gpu->index, key);
    if (lookup(full, out, size)) return SUCCESS;
    snprintf(full, sizeof full, "gpu*.%s", key);
    return lookup(full, out, size) ? SUCCESS : NOT_SUPPORTED;
}

static int gpu_text(const Gpu *gpu, const char *key, char *out, u32 size) {
    char text[TEXT];
    int result = gpu_raw(gpu, key, text, sizeof text);
    return result ? result : copy_text(text, out, size);
}

static int gpu_u64(const Gpu *gpu, const char *key, u64 *out) {
    char text[TEXT];
    int result = gpu_raw(gpu, key, text, sizeof text);
    if (!result && !*text) return NOT_SUPPORTED;
    if (!result) *out = strtoull(text, NULL, 0);
    return result;
}

static int gpu_u32(const Gpu *gpu, const char *key, u32 *out) {
    u64 value;
    int result = gpu_u64(gpu, key, &value);
    if (!result) *out = (u32)value;
    return result;
}

/* ---- the library and the system -------------------------------------------------------------------------- */

int nvmlInitWithFlags(u32 flags) {
    char text[TEXT];
    (void)flags;
    if (!refresh()) return DRIVER_NOT_LOADED;
    if (lookup("init_error", text, sizeof text) && atoi(text)) return atoi(text);
    for (int i = 0; i < MAX_GPUS; i++) gpus[i] = (Gpu){.index = i, .gi = -1};
    init_count++;
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!init_count) return UNINITIALIZED;
    init_count--;
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *out, u32 size) { return system_text("driver", out, size); }
int nvmlSystemGetNVMLVersion(char *out, u32 size) { return system_text("nvml", out, size); }

int nvmlSystemGetCudaDriverVersion(int *out) {
    char text[TEXT];
    int result = system_text("cuda", text, sizeof text);
    if (!result) *out = atoi(text);
    return result;
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

/* ---- handles ---------------------------------------------------------------------------------------------- */

int nvmlDeviceGetCount_v2(u32 *out) {
    char text[TEXT];
    int result = system_text("count", text, sizeof text);
    if (!result) *out = (u32)atoi(text);
    return result;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, Gpu **out) {
    u32 count;
    int result = nvmlDeviceGetCount_v2(&count);
    if (result) return result;
    if (index >= count || index >= MAX_GPUS) return INVALID_ARGUMENT;
    *out = &gpus[index];
    return check(*out);
}

/* The GPU whose text figure `key` equals `wanted`; a lost GPU cannot be found. */
static int find_gpu(const char *key, const char *wanted, Gpu **out) {
    char text[TEXT];
    u32 count;
    int result = nvmlDeviceGetCount_v2(&count);
    if (result) return result;
    for (u32 i = 0; i < count && i < MAX_GPUS; i++)
        if (!gpu_raw(&gpus[i], key, text, sizeof text) && !strcasecmp(text, wanted)) {
            *out = &gpus[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, Gpu **out) { return find_gpu("pci", pci, out); }

int nvmlDeviceGetIndex(Gpu *gpu, u32 *out) {
    int result = check(gpu);
    if (!result) *out = (u32)gpu->index;
    return result;
}

int nvmlDeviceGetMinorNumber(Gpu *gpu, u32 *out) {
    int result = check(gpu);
    if (!result) *out = (u32)gpu_number_or(gpu, "minor", gpu->index);
    return result;
}

/* ---- MIG --------------------------------------------------------------------------------------------------- */

typedef struct { u32 start, size; } Placement;
typedef struct { int gpu; u32 id, profile; Placement placement; } GpuInstance;
typedef struct { GpuInstance *parent; u32 id, slices; } ComputeInstance;
typedef struct { u32 id, slices, count, size, places; u64 memory_mib; char name[64]; Placement place[MAX_SLICES]; } Profile;

/* Handles stay those of their ids, as the driver's do until the instance is destroyed. */
static GpuInstance instances[MAX_GPUS][64];
static ComputeInstance computes[MAX_GPUS][64];

static int read_profile(Gpu *gpu, u32 number, Profile *out) {
    char key[48], text[TEXT], starts[TEXT] = "";
    snprintf(key, sizeof key, "mig_profile.%u", number);
    int result = gpu_raw(gpu, key, text, sizeof text);
    if (result) return result;
    memset(out, 0, sizeof *out);
    if (sscanf(text, "%u;%u;%u;%llu;%u;%63[^;];%1023s", &out->id, &out->slices, &out->count, &out->memory_mib, &out->size,
               out->name, starts) != 7) return UNKNOWN;
    char *rest = starts;
    for (char *start; (start = strsep(&rest, ",")) && out->places < MAX_SLICES;)
        out->place[out->places++] = (Placement){(u32)atoi(start), out->size};
    return SUCCESS;
}

static int profile_of_id(Gpu *gpu, u32 id, Profile *out) {
    for (u32 number = 0; number < 32; number++)
        if (!read_profile(gpu, number, out) && out->id == id) return SUCCESS;
    return INVALID_ARGUMENT;
}

/* The instances of a GPU, in the file's order, into `instances`; -1 if they cannot be listed. */
static int read_instances(Gpu *gpu, u32 *ids) {
    char text[TEXT];
    int found = 0;
    if (gpu_raw(gpu, "gis", text, sizeof text)) return 0;
    char *rest = text;
    for (char *item; (item = strsep(&rest, ","));) {
        GpuInstance one = {.gpu = gpu->index};
        if (sscanf(item, "%u:%u:%u:%u", &one.id, &one.profile, &one.placement.start, &one.placement.size) != 4) continue;
        if (one.id >= 64) continue;
        instances[gpu->index][one.id] = one;
        ids[found++] = one.id;
    }
    return found;
}

/* The MIG device with this index, into `migs`: compute instances in the file's order. */
static Gpu *mig_device(Gpu *gpu, u32 index) {
    char text[TEXT];
    u32 at = 0;
    if (index >= MAX_SLICES || gpu_raw(gpu, "cis", text, sizeof text)) return NULL;
    char *rest = text;
    for (char *item; (item = strsep(&rest, ","));) {
        Gpu one = {.index = gpu->index};
        if (sscanf(item, "%d:%d:%d:%47s", &one.gi, &one.ci, &one.slices, one.uuid) == 4 && at++ == index) {
            migs[gpu->index][index] = one;
            return &migs[gpu->index][index];
        }
    }
    return NULL;
}

/* Of a GPU, or of a MIG device. */
int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **out) {
    u32 count;
    int result = nvmlDeviceGetCount_v2(&count);
    if (result || !find_gpu("uuid", uuid, out)) return result;
    for (u32 i = 0; i < count && i < MAX_GPUS; i++)
        for (u32 at = 0; (*out = mig_device(&gpus[i], at)); at++)
            if (!strcasecmp((*out)->uuid, uuid)) return SUCCESS;
    return NOT_FOUND;
}

static int instance_of(Gpu *gpu, u32 id, GpuInstance **out) {
    u32 ids[64];
    int count = read_instances(gpu, ids);
    for (int i = 0; i < count; i++)
        if (ids[i] == id) {
            *out = &instances[gpu->index][id];
            return SUCCESS;
        }
    return NOT_FOUND;
}

static int mig_memory(Gpu *mig, u64 *total, u64 *reserved, u64 *available, u64 *used) {
    GpuInstance *instance;
    Profile profile;
    char key[48];
    Gpu *gpu = &gpus[mig->index];
    int result = check(mig);
    if (!result) result = instance_of(gpu, (u32)mig->gi, &instance);
    if (!result) result = profile_of_id(gpu, instance->profile, &profile);
    if (result) return result;
    snprintf(key, sizeof key, "gi%d.mem_used", mig->gi);
    *total = profile.memory_mib << 20;
    *reserved = 0;
    if (gpu_u64(gpu, key, used)) *used = 0;
    *available = *total - *used;
    return SUCCESS;
}

int nvmlDeviceGetName(Gpu *gpu, char *out, u32 size) {
    char text[TEXT];
    GpuInstance *instance;
    Profile profile;
    int result = gpu_raw(gpu, "name", text, sizeof text);
    if (!result && is_mig(gpu)) {
        result = instance_of(&gpus[gpu->index], (u32)gpu->gi, &instance);
        if (!result) result = profile_of_id(&gpus[gpu->index], instance->profile, &profile);
        if (!result) snprintf(text + strlen(text), sizeof text - strlen(text), " %s", profile.name);
    }
    return result ? result : copy_text(text, out, size);
}

/* What the calls that list GPU instances begin with. */
static int may_list(Gpu *gpu) {
    int result = check(gpu);
    if (result) return result;
    if (!is_whole(gpu)) return INVALID_ARGUMENT;
    if (gpu_number_or(gpu, "mig", 0) != 1) return NOT_SUPPORTED;
    return gpu_number_or(gpu, "mig_monitor", 1) ? SUCCESS : NO_PERMISSION;
}

int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, u32 *out) {
    Profile profile;
    int result = check(gpu);
    if (!result) *out = read_profile(gpu, 0, &profile) ? 0 : profile.count;
    return result;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, u32 index, Gpu **out) {
    int result = check(gpu);
    if (result) return result;
    if (!is_whole(gpu)) return INVALID_ARGUMENT;
    if (gpu_number_or(gpu, "mig", 0) != 1) return NOT_SUPPORTED;
    *out = mig_device(gpu, index);
    return *out ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Gpu *mig, Gpu **out) {
    int result = check(mig);
    if (result) return result;
    if (!is_mig(mig)) return INVALID_ARGUMENT;
    *out = &gpus[mig->index];
    return SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(Gpu *gpu, u32 *out) {
    int result = check(gpu);
    if (!result) *out = (u32)is_mig(gpu);
    return result;
}

int nvmlDeviceGetGpuInstanceId(Gpu *mig, u32 *out) {
    int result = check(mig);
    if (!result && !is_mig(mig)) result = NOT_SUPPORTED;
    if (!result) *out = (u32)mig->gi;
    return result;
}

int nvmlDeviceGetComputeInstanceId(Gpu *mig, u32 *out) {
    int result = nvmlDeviceGetGpuInstanceId(mig, out);
    if (!result) *out = (u32)mig->ci;
    return result;
}

typedef struct { u32 sms, copies, decoders, encoders, jpegs, ofas, gi_slices, ci_slices; u64 memory_mib; } Attributes;

int nvmlDeviceGetAttributes_v2(Gpu *mig, Attributes *out) {
    GpuInstance *instance;
    Profile profile;
    int result = check(mig);
    if (result) return result;
    if (!is_mig(mig)) return NOT_SUPPORTED;
    result = instance_of(&gpus[mig->index], (u32)mig->gi, &instance);
    if (!result) result = profile_of_id(&gpus[mig->index], instance->profile, &profile);
    if (result) return result;
    *out = (Attributes){.sms = 14 * (u32)mig->slices, .gi_slices = profile.slices, .ci_slices = (u32)mig->slices,
                        .memory_mib = profile.memory_mib};
    return SUCCESS;
}

typedef struct { u32 id, p2p, slices, count, sms, copies, decoders, encoders, jpegs, ofas; u64 memory_mib; } ProfileInfo;
typedef struct {
    u32 version, id, p2p, slices, count, sms, copies, decoders, encoders, jpegs, ofas;
    u64 memory_mib;
    char name[96];
} ProfileInfo2;

/* Answered with MIG mode off as well, as NVIDIA's library does. */
int nvmlDeviceGetGpuInstanceProfileInfo(Gpu *gpu, u32 number, ProfileInfo *out) {
    Profile profile;
    int result = read_profile(gpu, number, &profile);
    if (result) return result;
    *out = (ProfileInfo){.id = profile.id, .slices = profile.slices, .count = profile.count, .sms = 14 * profile.slices,
                         .copies = profile.slices, .memory_mib = profile.memory_mib};
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceProfileInfoV(Gpu *gpu, u32 number, ProfileInfo2 *out) {
    Profile profile;
    if (out->version != (sizeof *out | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    int result = read_profile(gpu, number, &profile);
    if (result) return result;
    *out = (ProfileInfo2){.version = out->version, .id = profile.id, .slices = profile.slices, .count = profile.count,
                          .sms = 14 * profile.slices, .copies = profile.slices, .memory_mib = profile.memory_mib};
    snprintf(out->name, sizeof out->name, "%s", profile.name);
    return SUCCESS;
}

/* With a null array only the number of placements is answered. */
int nvmlDeviceGetGpuInstancePossiblePlacements_v2(Gpu *gpu, u32 id, Placement *out, u32 *count) {
    Profile profile;
    int result = check(gpu);
    if (!result) result = profile_of_id(gpu, id, &profile);
    if (result) return result;
    u32 room = *count;
    *count = profile.places;
    if (!out) return SUCCESS;
    if (room < profile.places) return INSUFFICIENT_SIZE;
    memcpy(out, profile.place, profile.places * sizeof *out);
    return SUCCESS;
}

int nvmlDeviceGetGpuInstances(Gpu *gpu, u32 profile, GpuInstance **out, u32 *count) {
    u32 ids[64];
    int result = may_list(gpu);
    if (result) return result;
    int found = read_instances(gpu, ids);
    *count = 0;
    for (int i = 0; i < found; i++)
        if (instances[gpu->index][ids[i]].profile == profile) out[(*count)++] = &instances[gpu->index][ids[i]];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceById(Gpu *gpu, u32 id, GpuInstance **out) {
    int result = may_list(gpu);
    return result ? result : instance_of(gpu, id, out);
}

typedef struct { Gpu *device; u32 id, profile; Placement placement; } GpuInstanceInfo;

int nvmlGpuInstanceGetInfo(GpuInstance *instance, GpuInstanceInfo *out) {
    *out = (GpuInstanceInfo){&gpus[instance->gpu], instance->id, instance->profile, instance->placement};
    return check(out->device);
}

/* All compute instances of a GPU instance; a profile's id is the number of its slices here. */
int nvmlGpuInstanceGetComputeInstances(GpuInstance *instance, u32 profile, ComputeInstance **out, u32 *count) {
    Gpu *gpu = &gpus[instance->gpu], *mig;
    int result = check(gpu);
    *count = 0;
    for (u32 i = 0; !result && (mig = mig_device(gpu, i)); i++)
        if (mig->gi == (int)instance->id && (u32)mig->slices == profile) {
            computes[gpu->index][i] = (ComputeInstance){instance, (u32)mig->ci, (u32)mig->slices};
            out[(*count)++] = &computes[gpu->index][i];
        }
    return result;
}

typedef struct { Gpu *device; GpuInstance *parent; u32 id, profile; Placement placement; } ComputeInstanceInfo;

int nvmlComputeInstanceGetInfo_v2(ComputeInstance *one, ComputeInstanceInfo *out) {
    *out = (ComputeInstanceInfo){&gpus[one->parent->gpu], one->parent, one->id, one->slices, {0, one->slices}};
    return check(out->device);
}

/* ---- figures ---------------------------------------------------------------------------------------------- */

int nvmlDeviceGetUUID(Gpu *gpu, char *out, u32 size) {
    int result = check(gpu);
    if (result) return result;
    return is_mig(gpu) ? copy_text(gpu->uuid, out, size) : gpu_text(gpu, "uuid", out, size);
}
int nvmlDeviceGetSerial(Gpu *gpu, char *out, u32 size) { return gpu_text(gpu, "serial", out, size); }
int nvmlDeviceGetPowerUsage(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "power_mw", out); }
int nvmlDeviceGetEnforcedPowerLimit(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "power_limit_mw", out); }
int nvmlDeviceGetPowerManagementLimit(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "power_limit_mw", out); }
int nvmlDeviceGetTotalEnergyConsumption(Gpu *gpu, u64 *out) {
    u64 rate;
    struct timespec now;
    int result = gpu_u64(gpu, "energy_mj", out);
    if (!result && !gpu_u64(gpu, "energy_rate_mw", &rate)) {
        clock_gettime(CLOCK_BOOTTIME, &now);
        *out += rate * now.tv_sec + rate * (now.tv_nsec / 1000000) / 1000;
    }
    return result;
}
int nvmlDeviceGetPersistenceMode(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "persistence", out); }
int nvmlDeviceGetComputeMode(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "compute_mode", out); }
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, u64 *out) { return gpu_u64(gpu, "clocks_event_reasons", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, u64 *out) { return gpu_u64(gpu, "clocks_event_reasons", out); }

typedef struct { u64 total, free, used; } Memory;
typedef struct { u32 version; u64 total, reserved, free, used; } Memory2;

int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory2 *out) {
    if (out->version != (sizeof *out | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    if (is_mig(gpu)) return mig_memory(gpu, &out->total, &out->reserved, &out->free, &out->used);
    int result = gpu_u64(gpu, "mem_total", &out->total);
    if (!result) result = gpu_u64(gpu, "mem_used", &out->used);
    if (result) return result;
    if (gpu_u64(gpu, "mem_reserved", &out->reserved)) out->reserved = 0;
    out->free = out->total - out->used - out->reserved;
    return SUCCESS;
}

/* The first version of the call counts what the driver reserves as used. */
int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *out) {
    Memory2 memory = {.version = sizeof memory | 2u << 24};
    int result = nvmlDeviceGetMemoryInfo_v2(gpu, &memory);
    if (!result) *out = (Memory){memory.total, memory.free, memory.used + memory.reserved};
    return result;
}

typedef struct { u32 gpu, memory; } Utilization;

/* NVML gives none for a GPU in MIG mode, nor for its parts. */
int nvmlDeviceGetUtilizationRates(Gpu *gpu, Utilization *out) {
    if (is_mig(gpu) || gpu_number_or(gpu, "mig", 0) == 1) return NOT_SUPPORTED;
    int result = gpu_u32(gpu, "util_gpu", &out->gpu);
    return result ? result : gpu_u32(gpu, "util_mem", &out->memory);
}

typedef struct { u32 version, sensor; int celsius; } Temperature;

int nvmlDeviceGetTemperature(Gpu *gpu, u32 sensor, u32 *out) {
    return sensor ? INVALID_ARGUMENT : gpu_u32(gpu, "temp_c", out);
}

int nvmlDeviceGetTemperatureV(Gpu *gpu, Temperature *out) {
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return nvmlDeviceGetTemperature(gpu, out->sensor, (u32 *)&out->celsius);
}

int nvmlDeviceGetTemperatureThreshold(Gpu *gpu, u32 threshold, u32 *out) {
    return threshold == 1 ? gpu_u32(gpu, "temp_slowdown_c", out) : NOT_SUPPORTED;
}

typedef struct { u32 version; int celsius; } Margin;

int nvmlDeviceGetMarginTemperature(Gpu *gpu, Margin *out) {
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    return gpu_u32(gpu, "margin_c", (u32 *)&out->celsius);
}

int nvmlDeviceGetCurrPcieLinkWidth(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "pcie_width", out); }
int nvmlDeviceGetMaxPcieLinkWidth(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "pcie_width_max", out); }
int nvmlDeviceGetCurrPcieLinkGeneration(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "pcie_gen", out); }
int nvmlDeviceGetMaxPcieLinkGeneration(Gpu *gpu, u32 *out) { return gpu_u32(gpu, "pcie_gen_max", out); }

static int mode(Gpu *gpu, const char *key, u32 *current, u32 *pending) {
    int result = gpu_u32(gpu, key, current);
    if (!result) *pending = *current;
    return result;
}

int nvmlDeviceGetMigMode(Gpu *gpu, u32 *current, u32 *pending) { return mode(gpu, "mig", current, pending); }
int nvmlDeviceGetEccMode(Gpu *gpu, u32 *current, u32 *pending) { return mode(gpu, "ecc_mode", current, pending); }

int nvmlDeviceGetTotalEccErrors(Gpu *gpu, u32 type, u32 counter, u64 *out) {
    char key[48];
    snprintf(key, sizeof key, "ecc.%u.%u", type, counter);
    return gpu_u64(gpu, key, out);
}

/* Only device memory (location 2) keeps a count here: the same one as the total. */
int nvmlDeviceGetMemoryErrorCounter(Gpu *gpu, u32 type, u32 counter, u32 location, u64 *out) {
    return location == 2 ? nvmlDeviceGetTotalEccErrors(gpu, type, counter, out) : NOT_SUPPORTED;
}

int nvmlDeviceGetRemappedRows(Gpu *gpu, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    char text[TEXT];
    int result = gpu_raw(gpu, "remapped", text, sizeof text);
    if (result) return result;
    return sscanf(text, "%u,%u,%u,%u", corrected, uncorrected, pending, failed) == 4 ? SUCCESS : UNKNOWN;
}

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
    int result = gpu_u32(gpu, "cc_major", (u32 *)major);
    return result ? result : gpu_u32(gpu, "cc_minor", (u32 *)minor);
}

/* ---- field values ----------------------------------------------------------------------------------------- */

#define MAX_FIELDS 128
enum { UNSIGNED_INT = 1, REMAP_PENDING = 144, REMAP_FAILED = 145, NVLINK_STATE = 165 };

typedef struct {
    u32 id, scope;
    long long timestamp, latency_us;
    u32 type;
    int result;
    union { double d; u32 ui; u64 ull; } value;
} Field;

static void set_field(Field *field, u64 value) {
    field->type = UNSIGNED_INT;
    field->result = SUCCESS;
    field->value.ull = 0;
    field->value.ui = (u32)value;
}

/* One line about this GPU: KEY=VALUE without what names it. */
static void take_field(const char *key, const char *value, Field *fields, int count, u32 *links, u64 *down) {
    u32 id, scope = 0, pending, failed, link;
    if (sscanf(key, "field.%u.%u", &id, &scope) >= 1) {
        for (int i = 0; i < count; i++)
            if (fields[i].id == id && fields[i].scope == scope) set_field(&fields[i], strtoull(value, NULL, 0));
    } else if (!strcmp(key, "remapped") && sscanf(value, "%*u,%*u,%u,%u", &pending, &failed) == 2) {
        for (int i = 0; i < count; i++)
            if (fields[i].id == REMAP_PENDING || fields[i].id == REMAP_FAILED)
                set_field(&fields[i], fields[i].id == REMAP_PENDING ? pending : failed);
    } else if (!strcmp(key, "nvlinks")) *links = (u32)atoi(value);
    else if (sscanf(key, "nvlink%u", &link) == 1 && !strchr(key, '.') && link < 64) {
        if (atoi(value)) *down &= ~(1ull << link);
        else *down |= 1ull << link;
    }
}

/* All fields in one pass over the file, as NVIDIA's is one call; the GPU's own lines count more than those of all. */
int nvmlDeviceGetFieldValues(Gpu *gpu, int count, Field *fields) {
    char own[16];
    u32 links = 0;
    u64 down = 0;
    int result = check(gpu);
    if (result) return result;
    if (count < 1 || count > MAX_FIELDS) return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++) fields[i].result = NOT_SUPPORTED;
    snprintf(own, sizeof own, "gpu%d.", gpu->index);
    for (int pass = 0; pass < 2; pass++) {
        const char *prefix = pass ? own : "gpu*.";
        FILE *file = open_file();
        if (!file) return UNKNOWN;
        char *line = NULL;
        size_t capacity = 0;
        while (getline(&line, &capacity, file) > 0) {
            line[strcspn(line, "\r\n")] = 0;
            char *value = strchr(line, '=');
            if (!value || strncmp(line, prefix, strlen(prefix))) continue;
            *value++ = 0;
            take_field(line + strlen(prefix), value, fields, count, &links, &down);
        }
        free(line);
        fclose(file);
    }
    for (int i = 0; i < count; i++)
        if (fields[i].id == NVLINK_STATE && fields[i].scope < links && fields[i].result)
            set_field(&fields[i], !(down >> fields[i].scope & 1));
    return SUCCESS;
}

/* ---- processes -------------------------------------------------------------------------------------------- */

typedef struct { u32 pid; u64 used_bytes; u32 gpu_instance, compute_instance; } Process;

/* As NVIDIA's: `count` is the room in `out` on entry and the number of processes on return. */
static int processes(Gpu *gpu, const char *key, u32 *count, Process *out) {
    char text[TEXT] = "";
    int result = gpu_raw(gpu, key, text, sizeof text);
    if (result && result != NOT_SUPPORTED) return result;
    u32 room = *count, found = 0;
    char *rest = text;
    for (char *item; (item = strsep(&rest, ","));) {
        if (!*item) continue;
        char *colon = strchr(item, ':'), *second = colon ? strchr(colon + 1, ':') : NULL;
        Process process = {(u32)strtoul(item, NULL, 10), colon ? strtoull(colon + 1, NULL, 0) : ~0ULL, ~0u, ~0u};
        if (second) process.gpu_instance = (u32)strtoul(second + 1, NULL, 10), process.compute_instance = 0;
        if (is_mig(gpu) && process.gpu_instance != (u32)gpu->gi) continue;
        if (out && found < room) out[found] = process;
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, u32 *count, Process *out) {
    return processes(gpu, "procs", count, out);
}
int nvmlDeviceGetComputeRunningProcesses_v2(Gpu *gpu, u32 *count, Process *out) {
    return processes(gpu, "procs", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *gpu, u32 *count, Process *out) {
    return processes(gpu, "graphics_procs", count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(Gpu *gpu, u32 *count, Process *out) {
    return processes(gpu, "graphics_procs", count, out);
}

typedef struct { u32 pid; u64 time_us; u32 sm, memory, encoder, decoder; } ProcessShare;

/* As NVIDIA's: processes that did nothing are left out, and where none did anything nothing is found. */
int nvmlDeviceGetProcessUtilization(Gpu *gpu, ProcessShare *out, u32 *count, u64 since_us) {
    char text[TEXT] = "";
    int result = gpu_raw(gpu, "proc_util", text, sizeof text);
    if (result) return result;
    u32 room = out ? *count : 0, found = 0;
    char *rest = text;
    for (char *item; (item = strsep(&rest, ","));) {
        char *colon = strchr(item, ':');
        if (!colon) continue;
        if (found < room) out[found] = (ProcessShare){.pid = (u32)strtoul(item, NULL, 10), .time_us = since_us + 1,
                                                      .sm = (u32)strtoul(colon + 1, NULL, 10)};
        found++;
    }
    *count = found;
    return !found ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* ---- events ----------------------------------------------------------------------------------------------- */

enum { XID_CRITICAL_ERROR = 8, POLL_MS = 200 };
typedef struct { int registered[MAX_GPUS]; char seen[MAX_GPUS][32]; } EventSet;
typedef struct { Gpu *gpu; u64 type, data; u32 gpu_instance, compute_instance; } Event;

static void last_xid(Gpu *gpu, char *out, size_t size) {
    char text[TEXT] = "";
    if (gpu_raw(gpu, "xid", text, sizeof text)) *text = 0;
    snprintf(out, size, "%.31s", text);
}

int nvmlEventSetCreate(EventSet **out) {
    if (!init_count) return UNINITIALIZED;
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

int nvmlEventSetFree(EventSet *set) {
    free(set);
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(Gpu *gpu, u64 *out) {
    *out = XID_CRITICAL_ERROR;
    return check(gpu);
}

int nvmlDeviceRegisterEvents(Gpu *gpu, u64 types, EventSet *set) {
    int result = check(gpu);
    if (result || !is_whole(gpu)) return result ? result : INVALID_ARGUMENT;
    if (types & ~(u64)XID_CRITICAL_ERROR) return NOT_SUPPORTED;
    set->registered[gpu->index] = 1;
    last_xid(gpu, set->seen[gpu->index], sizeof set->seen[0]);
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet *set, Event *out, u32 timeout_ms) {
    for (u32 waited = 0;; waited += POLL_MS) {
        for (int i = 0; i < MAX_GPUS; i++) {
            char now[32], *colon;
            if (!set->registered[i]) continue;
            if (check(&gpus[i]) == GPU_IS_LOST) return GPU_IS_LOST;
            last_xid(&gpus[i], now, sizeof now);
            if (!strcmp(now, set->seen[i])) continue;
            strcpy(set->seen[i], now);
            if (!(colon = strchr(now, ':'))) continue;
            *out = (Event){&gpus[i], XID_CRITICAL_ERROR, strtoull(colon + 1, NULL, 0), ~0u, ~0u};
            return SUCCESS;
        }
        if (waited >= timeout_ms) return TIMEOUT;
        usleep(POLL_MS * 1000);
    }
}

/* ---- PCI, NVLink, topology -------------------------------------------------------------------------------- */

typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } Pci;

static int parse_pci(const char *text, Pci *out) {
    u32 function;
    memset(out, 0, sizeof *out);
    if (sscanf(text, "%x:%x:%x.%u", &out->domain, &out->bus, &out->device, &function) != 4) return UNKNOWN;
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.%u", out->domain, out->bus, out->device, function);
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.%u", out->domain, out->bus, out->device, function);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *out) {
    char text[TEXT];
    int result = gpu_raw(gpu, "pci", text, sizeof text);
    return result ? result : parse_pci(text, out);
}

static int link_key(Gpu *gpu, u32 link, const char *suffix, char *key, size_t size) {
    u32 links;
    int result = gpu_u32(gpu, "nvlinks", &links);
    if (result) return result;
    snprintf(key, size, "nvlink%u%s", link, suffix);
    return link < links ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(Gpu *gpu, u32 link, u32 *active) {
    char key[48];
    int result = link_key(gpu, link, "", key, sizeof key);
    if (!result) *active = gpu_number_or(gpu, key, 1) != 0;
    return result;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, u32 link, Pci *out) {
    char key[48], text[TEXT];
    int result = link_key(gpu, link, ".peer", key, sizeof key);
    if (!result) result = gpu_raw(gpu, key, text, sizeof text);
    return result ? result : parse_pci(text, out);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Gpu *gpu, u32 link, u32 *out) {
    char key[48];
    int result = link_key(gpu, link, ".peer_type", key, sizeof key);
    return result ? result : gpu_u32(gpu, key, out);
}

typedef struct { u32 version; unsigned char uuid[16]; u32 status, clique, state, health; } Fabric;

int nvmlDeviceGetGpuFabricInfoV(Gpu *gpu, Fabric *out) {
    char text[TEXT], digits[33];
    int result = gpu_raw(gpu, "fabric", text, sizeof text);
    if (result) return result;
    if (out->version != 0x02000024) return ARGUMENT_VERSION_MISMATCH;
    if (sscanf(text, "%32[0-9a-f],%u,%u", digits, &out->clique, &out->state) != 3) return UNKNOWN;
    for (int i = 0; i < 16; i++) {
        u32 byte;
        sscanf(digits + 2 * i, "%2x", &byte);
        out->uuid[i] = (unsigned char)byte;
    }
    out->status = SUCCESS;
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(Gpu *a, Gpu *b, u32 *out) {
    char key[48], text[TEXT];
    int result = check(a);
    if (!result) result = check(b);
    if (result) return result;
    snprintf(key, sizeof key, "topo.%d.%d", a->index < b->index ? a->index : b->index,
             a->index < b->index ? b->index : a->index);
    if (a == b) *out = 0;
    else if (lookup(key, text, sizeof text) || lookup("topo", text, sizeof text)) *out = (u32)atoi(text);
    else return NOT_SUPPORTED;
    return SUCCESS;
}
