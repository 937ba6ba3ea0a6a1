// Package upgrade tests that drivers of different versions take over each other's mounts. The older version is that of
// testdata/older.tar.gz, which make builds; hack/freeze makes the archive of a commit.
package upgrade
