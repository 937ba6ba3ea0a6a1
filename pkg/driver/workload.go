package driver

import (
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Keys of kubelet's pod information, with podInfoOnMount: true (Kubernetes CSI documentation, "Pod Info on Mount").
const (
	podNamespaceKey   = metadataPrefix + "pod.namespace"
	podNameKey        = metadataPrefix + "pod.name"
	serviceAccountKey = metadataPrefix + "serviceAccount.name"
)

// readPod reads the pod's namespace, name and service account, if the CO passes them.
func (p *publication) readPod(context map[string]string) error {
	for key, to := range map[string]*string{podNamespaceKey: &p.PodNamespace, podNameKey: &p.PodName, serviceAccountKey: &p.ServiceAccount} {
		value := context[key]
		if value != "" && (len(value) > 253 || checkAlphabet(value, "-.") != nil) {
			return fault.Field("volume_context."+key, "%q is not a Kubernetes name", value)
		}
		*to = value
	}
	return nil
}

// readWorkload reads the tokens of the pod's service account: from the secrets (newer kubelets), else from the volume context.
func (p *publication) readWorkload(secrets, context map[string]string) error {
	if p.PodNamespace == "" || p.ServiceAccount == "" {
		return fault.Errorf(fault.Precondition, "the volume has credentials: workload, but the request does not have the pod's namespace and service account: "+
			"set podInfoOnMount: true in the CSIDriver object")
	}
	field, text := "secrets", secrets[tokensKey]
	if text == "" {
		field, text = "volume_context", context[tokensKey]
	}
	if text == "" {
		return fault.Errorf(fault.Precondition, "the volume has credentials: workload, but the request has no token of service account %s/%s: "+
			"add the token service's audience to tokenRequests of the CSIDriver object, and set requiresRepublish: true", p.PodNamespace, p.ServiceAccount)
	}
	tokens, err := credentials.ParseTokens(text)
	if err != nil {
		return err
	}
	for audience, token := range tokens {
		namespace, account, ok := subjectOf(token.Value)
		if ok && (namespace != p.PodNamespace || account != p.ServiceAccount) {
			return fault.Field(field+"."+tokensKey, "the token of audience %q belongs to service account %s/%s, but the pod has %s/%s", audience, namespace,
				account, p.PodNamespace, p.ServiceAccount)
		}
	}
	p.Source, p.Tokens = credentials.SourceWorkload, tokens
	p.Identity = credentials.SourceWorkload + ":" + p.PodNamespace + "/" + p.ServiceAccount
	return nil
}

// subjectOf returns the namespace and the name of the service account in a token (Kubernetes, "Managing Service Accounts"; RFC 7519,
// section 4.1.2). ok is false if the token cannot be parsed. The token service verifies tokens, the driver does not.
func subjectOf(token string) (namespace, account string, ok bool) {
	var claims struct {
		Subject string `json:"sub"`
	}
	if !credentials.ReadClaims(token, &claims) {
		return "", "", false
	}
	rest, ok := strings.CutPrefix(claims.Subject, "system:serviceaccount:")
	if !ok {
		return "", "", false
	}
	return strings.Cut(rest, ":")
}
