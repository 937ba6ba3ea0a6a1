{{/* Names and labels. */}}

{{- define "s3csi.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 42 | trimSuffix "-" -}}
{{- end -}}

{{- define "s3csi.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 42 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "s3csi.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 42 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 42 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Immutable labels that select a component's pods. Call with (list $ "controller"). */}}
{{- define "s3csi.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "s3csi.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of the chart's own for objects and pods, as YAML. Call with (list $ "controller"), or (list $ "") for an object of no component. */}}
{{- define "s3csi.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "s3csi.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: s3-csi-driver
{{- end -}}

{{/*
Labels and annotations of an object. The chart's own win over those of values, and the object's over common ones. Call with
(list $ "controller" LABELS ANNOTATIONS), where the last two can be left out.
*/}}
{{- define "s3csi.metadata" -}}
{{- $root := index . 0 -}}
{{- $own := include "s3csi.labels" (slice . 0 2) | fromYaml -}}
{{- $chart := dict "app.kubernetes.io/managed-by" $root.Release.Service "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- include "s3csi.metadataOf" (dict "root" $root "labels" (merge $own $chart (rest (rest .) | first | default dict)) "annotations" (rest (rest (rest .)) | first | default dict)) -}}
{{- end -}}

{{/* Labels and annotations of pods, which do not change with the chart's version. Called as s3csi.metadata. */}}
{{- define "s3csi.podMetadata" -}}
{{- $own := include "s3csi.labels" (slice . 0 2) | fromYaml -}}
{{- $annotations := merge (dict "kubectl.kubernetes.io/default-container" "s3-csi-driver") (index . 3 | default dict) -}}
{{- include "s3csi.metadataOf" (dict "root" (index . 0) "labels" (merge $own (index . 2 | default dict)) "annotations" $annotations) -}}
{{- end -}}

{{/* Adds what all objects and pods have. */}}
{{- define "s3csi.metadataOf" -}}
labels:
  {{- merge .labels (.root.Values.commonLabels | default dict) | toYaml | nindent 2 }}
{{- with merge dict .annotations (.root.Values.commonAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "s3csi.serviceAccountName" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- (index $root.Values $component).serviceAccount.name | default (printf "%s-%s" (include "s3csi.fullname" $root) $component) -}}
{{- end -}}

{{/* Which parts are installed: "true" or "". */}}
{{- define "s3csi.hasController" -}}{{ if not .Values.nodeComponentOnly }}true{{ end }}{{- end -}}
{{- define "s3csi.hasNode" -}}{{ if not .Values.controllerOnly }}true{{ end }}{{- end -}}

{{/* Whether only one controller may run. */}}
{{- define "s3csi.singleController" -}}
{{- if .Values.existingConfig.singleController }}true{{ end -}}
{{- range $name, $backend := .Values.backends }}{{ if $backend.singleController }}true{{ end }}{{ end -}}
{{- end -}}

{{/*
An image reference, with its digest if there is one, from global.imageRegistry if that is set. A digest with a tag is used only for
that tag: container runtimes ignore the tag of an image with a digest, so another tag with the chart's digest would pull the chart's
version. Call with (list $ image tag).
*/}}
{{- define "s3csi.reference" -}}
{{- $image := index . 1 -}}
{{- $tag := index . 2 -}}
{{- with (index . 0).Values.global.imageRegistry }}{{ . }}/{{ regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $image.repository "" }}{{ else }}{{ $image.repository }}{{ end -}}
:{{ $tag }}
{{- $digest := trimPrefix (printf "%s@" $tag) $image.digest -}}
{{- if hasPrefix "sha256:" $digest }}@{{ $digest }}{{ end -}}
{{- end -}}

{{- define "s3csi.image" -}}
{{ include "s3csi.reference" (list . .Values.image (.Values.image.tag | default .Chart.AppVersion)) }}
{{- end -}}

{{/* Image and pull policy of a sidecar's container. Call with (list $ .Values.sidecars.provisioner). */}}
{{- define "s3csi.sidecarImage" -}}
{{- $root := index . 0 -}}
{{- $image := (index . 1).image -}}
image: {{ include "s3csi.reference" (list $root $image $image.tag) }}
imagePullPolicy: {{ $image.pullPolicy | default $root.Values.image.pullPolicy }}
{{- end -}}

{{/* Whether the config file is an existing object's: "true" or "". */}}
{{- define "s3csi.existingConfig" -}}{{ if or .Values.existingConfig.configMapName .Values.existingConfig.secretName }}true{{ end }}{{- end -}}

{{/* Whether there is a config file: "true" or "". */}}
{{- define "s3csi.hasConfig" -}}{{ if or .Values.backends .Values.clients (include "s3csi.existingConfig" .) }}true{{ end }}{{- end -}}

{{/* The volume of the config file and the certificates. */}}
{{- define "s3csi.configVolume" -}}
{{- $own := printf "%s-config" (include "s3csi.fullname" .) -}}
{{- $config := .Values.existingConfig -}}
{{- $ca := .Values.existingCACertificates -}}
name: config
{{- if not (or (include "s3csi.existingConfig" .) $ca.configMapName $ca.secretName) }}
configMap:
  name: {{ $own }}
{{- else }}
projected:
  sources:
    {{- with $ca.configMapName }}
    - configMap:
        name: {{ . }}
    {{- end }}
    {{- with $ca.secretName }}
    - secret:
        name: {{ . }}
    {{- end }}
    # The last one, so that a certificate's file does not replace the config file.
    {{- if $config.secretName }}
    - secret:
        name: {{ $config.secretName }}
    {{- else }}
    - configMap:
        name: {{ $config.configMapName | default $own }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Directory of the config file and the certificates in the driver's containers. */}}
{{- define "s3csi.configDir" -}}/etc/s3-csi-driver{{- end -}}

{{/*
The address that an HTTP endpoint listens on. On the host network, which kubelet uses too, it is the loopback address unless the
endpoint is open. Call with a dict of hostNetwork, open, port.
*/}}
{{- define "s3csi.address" -}}
{{- if and .hostNetwork (not .open) }}127.0.0.1{{ end }}:{{ int .port }}
{{- end -}}

{{/* Names of the ports with metrics, as YAML. Call with (list $ "controller"). */}}
{{- define "s3csi.metricsPorts" -}}
- driver
{{- if eq (index . 1) "controller" }}
- provisioner
{{- if (index . 0).Values.sidecars.resizer.enabled }}
- resizer
{{- end }}
{{- if (index . 0).Values.snapshots.enabled }}
- snapshotter
{{- end }}
{{- end }}
{{- end -}}

{{/* A probe of such an endpoint. Call with a dict of hostNetwork, open, port (a name), path. */}}
{{- define "s3csi.httpGet" -}}
httpGet:
  {{- if and .hostNetwork (not .open) }}
  host: 127.0.0.1
  {{- end }}
  path: {{ .path }}
  port: {{ .port }}
{{- end -}}

{{/* How a pod resolves names, and no variables for Services, whose names can begin like those of flags (S3_CSI_…). Call with the values of the component. */}}
{{- define "s3csi.names" }}
enableServiceLinks: false
{{- with .dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* One endpoint of a ServiceMonitor or PodMonitor. Call with (list PORT MONITOR). */}}
{{- define "s3csi.monitorEndpoint" -}}
- port: {{ index . 0 }}
  {{- with index . 1 }}
  {{- with .interval }}
  interval: {{ . }}
  {{- end }}
  {{- with .scrapeTimeout }}
  scrapeTimeout: {{ . }}
  {{- end }}
  {{- with .relabelings }}
  relabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .metricRelabelings }}
  metricRelabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* What the pods of the controller and of helm test have in common: identity, network and nodes. */}}
{{- define "s3csi.controllerPod" -}}
{{- $c := .Values.controller -}}
serviceAccountName: {{ include "s3csi.serviceAccountName" (list . "controller") }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $c.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- include "s3csi.names" $c }}
securityContext:
  # All containers run as the same user, because only that user can open the driver's socket.
  runAsNonRoot: true
  runAsUser: {{ int64 $c.runAsUser }}
  runAsGroup: {{ int64 $c.runAsUser }}
  fsGroup: {{ int64 $c.runAsUser }}
  seccompProfile:
    type: RuntimeDefault
{{- with $c.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $c.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Environment variables with the keys of a Secret. Call with (list $ NAME). */}}
{{- define "s3csi.keysEnv" -}}
{{- $name := index . 1 -}}
{{- with (index . 0).Values.driverCredentials.keys -}}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef:
      name: {{ $name }}
      key: {{ .accessKeyID }}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef:
      name: {{ $name }}
      key: {{ .secretAccessKey }}
{{- with .sessionToken }}
- name: AWS_SESSION_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $name }}
      key: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The driver's environment. Call with (list $ "controller"), or with (list $ "controller" NAME) for the keys of another Secret. */}}
{{- define "s3csi.driverEnv" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $c := $root.Values.driverCredentials -}}
{{- with rest (rest .) | first | default (ternary $c.secretName "" (index $c $component)) }}
{{ include "s3csi.keysEnv" (list $root .) }}
{{- end }}
{{- with (index $root.Values $component).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The sidecar livenessprobe. Call with (list $ "controller"). */}}
{{- define "s3csi.livenessProbe" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
{{- $sidecar := $root.Values.sidecars.livenessProbe -}}
- name: liveness-probe
  {{- include "s3csi.sidecarImage" (list $root $sidecar) | nindent 2 }}
  args:
    - --csi-address=/csi/csi.sock
    - --http-endpoint={{ include "s3csi.address" (dict "hostNetwork" $values.hostNetwork "open" false "port" $values.ports.liveness) }}
    - --probe-timeout=3s
    - --v={{ int $sidecar.logLevel }}
    {{- with $sidecar.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumeMounts:
    - name: socket-dir
      mountPath: /csi
  {{- with $sidecar.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $sidecar.securityContext | nindent 4 }}
{{- end -}}

{{/* The rules of a role that reads Secrets. */}}
{{- define "s3csi.secretRules" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end -}}

{{/* Whether the sidecars must read Secrets: "true" or "". */}}
{{- define "s3csi.readsSecrets" -}}
{{- $reads := .Values.rbac.secrets -}}
{{- range $class := .Values.storageClasses }}
{{- range $use := list "provisioner" "controller-expand" "controller-modify" }}
{{- if hasKey ($class.parameters | default dict) (printf "csi.storage.k8s.io/%s-secret-name" $use) }}{{ $reads = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $class := .Values.volumeSnapshotClasses }}
{{- range $use := list "snapshotter" "snapshotter-list" }}
{{- if hasKey ($class.parameters | default dict) (printf "csi.storage.k8s.io/%s-secret-name" $use) }}{{ $reads = true }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $reads }}true{{ end -}}
{{- end -}}

{{/* The backends that the chart knows, as YAML: those of the values, or AWS. */}}
{{- define "s3csi.backends" -}}
{{- if not (include "s3csi.existingConfig" .) }}{{ .Values.backends | default (dict "default" dict) | toYaml }}{{ end -}}
{{- end -}}

{{/* tokenRequests of the CSIDriver object, as YAML; "" for none. */}}
{{- define "s3csi.tokenRequests" -}}
{{- $t := .Values.csiDriver.tokenRequests -}}
{{- $audiences := list -}}
{{- if $t.derive -}}
{{- range $name, $backend := (include "s3csi.backends" . | fromYaml) -}}
{{- $audience := dig "sts" "audience" "" $backend | default (ternary "" "sts.amazonaws.com" (hasKey $backend "endpoint")) -}}
{{- if $audience }}{{ $audiences = append $audiences $audience }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if $t.podIdentity }}{{ $audiences = append $audiences "pods.eks.amazonaws.com" }}{{ end -}}
{{- $requests := list -}}
{{- $additional := list -}}
{{- range $t.additional }}{{ $additional = append $additional .audience }}{{ end -}}
{{- range ($audiences | uniq | sortAlpha) -}}
{{- if not (has . $additional) }}{{ $requests = append $requests (dict "audience" . "expirationSeconds" (int64 $t.expirationSeconds)) }}{{ end -}}
{{- end -}}
{{- with concat $requests $t.additional }}{{ toYaml . }}{{ end -}}
{{- end -}}
