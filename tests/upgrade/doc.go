// Package upgrade tests that drivers of different versions take over each other's mounts. The older version is that of an earlier
// commit, which hack/older chooses and builds.
package upgrade
