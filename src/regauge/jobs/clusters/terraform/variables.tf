variable "name" {
  description = "Name of the cluster."
  type        = string
}

variable "region" {
  description = "Region of the cluster."
  type        = string
}

variable "zones" {
  description = "Availability zones that have subnets."
  type        = list(string)
}

variable "kubernetes_version" {
  description = "Version of Kubernetes."
  type        = string
}

variable "addons" {
  description = "Add-ons of EKS."
  type        = list(string)
}

variable "addon_values" {
  description = "Configuration of add-ons in JSON."
  type        = map(string)
}

variable "node_groups" {
  description = "Groups of machines by name."
  type = map(object({
    instance             = string
    count                = number
    min_count            = number
    max_count            = number
    market               = string
    zones                = list(string)
    capacity_reservation = optional(string)
    reservation_group    = optional(string)
    placement_group      = optional(string)
    ami                  = optional(string)
    ami_type             = string
    volume_gib           = number
    efa_interfaces       = number
    labels               = map(string)
    taint                = optional(string)
  }))
}

variable "lustre" {
  description = "FSx for Lustre file systems by name."
  type = map(object({
    size_gib = number
    zone     = string
  }))
  default = {}
}

variable "efs" {
  description = "Names of the EFS file systems."
  type        = set(string)
  default     = []
}

variable "tags" {
  description = "Tags of everything that is created."
  type        = map(string)
}
