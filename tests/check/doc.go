// Package check tests s3-csi-driver check as an operator runs it: the program, against services that can do more and less.
package check
