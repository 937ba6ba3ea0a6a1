package sandbox

import "golang.org/x/sys/unix"

const architecture = unix.AUDIT_ARCH_AARCH64

// earlier returns the allowed calls that other architectures do not have under this name.
func earlier() []uint32 { return []uint32{unix.SYS_FSTATAT} }

func earlierConditions(map[uint32]condition, uint32, uint32) {}
