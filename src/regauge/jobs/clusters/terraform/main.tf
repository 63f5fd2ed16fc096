terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.79"
    }
  }
}

provider "aws" {
  region = var.region
  default_tags {
    tags = var.tags
  }
}

locals {
  subnets = { for index, zone in var.zones : zone => index }
  node_policies = [
    "AmazonEKSWorkerNodePolicy",
    "AmazonEKS_CNI_Policy",
    "AmazonEC2ContainerRegistryReadOnly",
    "AmazonSSMManagedInstanceCore",
  ]
  # Permissions of the add-ons' service accounts, through EKS Pod Identity.
  identities = {
    "amazon-cloudwatch-observability" = {
      account = "cloudwatch-agent"
      policy  = "arn:aws:iam::aws:policy/CloudWatchAgentServerPolicy"
    }
    "aws-ebs-csi-driver" = {
      account = "ebs-csi-controller-sa"
      policy  = "arn:aws:iam::aws:policy/service-role/AmazonEBSCSIDriverPolicy"
    }
    "aws-efs-csi-driver" = {
      account = "efs-csi-controller-sa"
      policy  = "arn:aws:iam::aws:policy/service-role/AmazonEFSCSIDriverPolicy"
    }
    "aws-fsx-csi-driver" = {
      account = "fsx-csi-controller-sa"
      policy  = "arn:aws:iam::aws:policy/AmazonFSxFullAccess"
    }
  }
}

resource "aws_vpc" "cluster" {
  cidr_block           = "10.0.0.0/16"
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

resource "aws_internet_gateway" "cluster" {
  vpc_id = aws_vpc.cluster.id
  tags   = { Name = var.name }
}

resource "aws_subnet" "public" {
  for_each                = local.subnets
  vpc_id                  = aws_vpc.cluster.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet("10.0.0.0/16", 8, each.value)
  map_public_ip_on_launch = true
  tags = {
    Name                     = "${var.name}-public-${each.key}"
    "kubernetes.io/role/elb" = "1"
  }
}

resource "aws_subnet" "private" {
  for_each          = local.subnets
  vpc_id            = aws_vpc.cluster.id
  availability_zone = each.key
  cidr_block        = cidrsubnet("10.0.0.0/16", 3, each.value + 1)
  tags = {
    Name                              = "${var.name}-private-${each.key}"
    "kubernetes.io/role/internal-elb" = "1"
  }
}

resource "aws_eip" "nat" {
  domain = "vpc"
  tags   = { Name = "${var.name}-nat" }
}

resource "aws_nat_gateway" "cluster" {
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.public[var.zones[0]].id
  tags          = { Name = var.name }
  depends_on    = [aws_internet_gateway.cluster]
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.cluster.id
  route {
    cidr_block = "0.0.0.0/0"
    gateway_id = aws_internet_gateway.cluster.id
  }
  tags = { Name = "${var.name}-public" }
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.cluster.id
  route {
    cidr_block     = "0.0.0.0/0"
    nat_gateway_id = aws_nat_gateway.cluster.id
  }
  tags = { Name = "${var.name}-private" }
}

resource "aws_route_table_association" "public" {
  for_each       = aws_subnet.public
  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table_association" "private" {
  for_each       = aws_subnet.private
  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}

resource "aws_iam_role" "cluster" {
  name = "${var.name}-cluster"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "eks.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "cluster" {
  role       = aws_iam_role.cluster.name
  policy_arn = "arn:aws:iam::aws:policy/AmazonEKSClusterPolicy"
}

resource "aws_iam_role" "node" {
  name = "${var.name}-node"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "ec2.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each   = toset(local.node_policies)
  role       = aws_iam_role.node.name
  policy_arn = "arn:aws:iam::aws:policy/${each.value}"
}

resource "aws_eks_cluster" "cluster" {
  name     = var.name
  version  = var.kubernetes_version
  role_arn = aws_iam_role.cluster.arn
  vpc_config {
    subnet_ids              = [for subnet in aws_subnet.private : subnet.id]
    endpoint_private_access = true
    endpoint_public_access  = true
  }
  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = true
  }
  upgrade_policy {
    support_type = "STANDARD"
  }
  depends_on = [aws_iam_role_policy_attachment.cluster]
}

# EFA needs all traffic between the machines of a group, in both directions.
resource "aws_security_group" "efa" {
  name        = "${var.name}-efa"
  description = "EFA traffic between machines"
  vpc_id      = aws_vpc.cluster.id
  ingress {
    description = "EFA"
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    self        = true
  }
  egress {
    description = "EFA"
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    self        = true
  }
  egress {
    description = "Images, data and the API server"
    from_port   = 0
    to_port     = 0
    protocol    = "-1"
    cidr_blocks = ["0.0.0.0/0"]
  }
}

resource "aws_launch_template" "node" {
  for_each      = var.node_groups
  name          = "${var.name}-${each.key}"
  instance_type = each.value.instance
  image_id      = each.value.ami
  # A custom image gets no user data from EKS.
  user_data = each.value.ami == null ? null : base64encode(templatefile(
    "${path.module}/nodeadm.tftpl",
    { cluster = aws_eks_cluster.cluster, labels = each.value.labels, taint = each.value.taint }
  ))
  # Interfaces of a launch template replace its security groups.
  vpc_security_group_ids = each.value.efa_interfaces > 0 ? null : [
    aws_eks_cluster.cluster.vpc_config[0].cluster_security_group_id,
  ]

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size = each.value.volume_gib
      volume_type = "gp3"
      encrypted   = true
    }
  }

  metadata_options {
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }

  dynamic "network_interfaces" {
    for_each = range(each.value.efa_interfaces)
    content {
      network_card_index = network_interfaces.value
      device_index       = network_interfaces.value == 0 ? 0 : 1
      interface_type     = "efa"
      security_groups = [
        aws_eks_cluster.cluster.vpc_config[0].cluster_security_group_id,
        aws_security_group.efa.id,
      ]
      delete_on_termination = true
    }
  }

  dynamic "placement" {
    for_each = each.value.placement_group == null ? [] : [each.value.placement_group]
    content {
      group_name = placement.value
    }
  }

  dynamic "instance_market_options" {
    for_each = each.value.market == "capacity-block" ? [each.value.market] : []
    content {
      market_type = instance_market_options.value
    }
  }

  dynamic "capacity_reservation_specification" {
    for_each = try(coalesce(each.value.capacity_reservation, each.value.reservation_group), null) == null ? [] : [1]
    content {
      capacity_reservation_target {
        capacity_reservation_id                 = each.value.capacity_reservation
        capacity_reservation_resource_group_arn = each.value.reservation_group
      }
    }
  }

  tag_specifications {
    resource_type = "instance"
    tags          = merge(var.tags, { Name = "${var.name}-${each.key}" })
  }

  tag_specifications {
    resource_type = "volume"
    tags          = var.tags
  }
}

resource "aws_eks_node_group" "node" {
  for_each        = var.node_groups
  cluster_name    = aws_eks_cluster.cluster.name
  node_group_name = each.key
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [for zone in each.value.zones : aws_subnet.private[zone].id]
  ami_type        = each.value.ami == null ? each.value.ami_type : null
  capacity_type = {
    "on-demand"      = "ON_DEMAND"
    "spot"           = "SPOT"
    "capacity-block" = "CAPACITY_BLOCK"
  }[each.value.market]
  labels = each.value.labels

  scaling_config {
    desired_size = each.value.count
    min_size     = each.value.min_count
    max_size     = each.value.max_count
  }

  launch_template {
    id      = aws_launch_template.node[each.key].id
    version = aws_launch_template.node[each.key].latest_version
  }

  dynamic "taint" {
    for_each = each.value.taint == null ? [] : [each.value.taint]
    content {
      key    = taint.value
      value  = "present"
      effect = "NO_SCHEDULE"
    }
  }

  depends_on = [aws_iam_role_policy_attachment.node]
}

resource "aws_iam_role" "addon" {
  for_each = { for name, identity in local.identities : name => identity if contains(var.addons, name) }
  name     = "${var.name}-${each.key}"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Principal = { Service = "pods.eks.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "addon" {
  for_each   = aws_iam_role.addon
  role       = each.value.name
  policy_arn = local.identities[each.key].policy
}

resource "aws_eks_addon" "addon" {
  for_each             = toset(var.addons)
  cluster_name         = aws_eks_cluster.cluster.name
  addon_name           = each.value
  configuration_values = lookup(var.addon_values, each.value, null)

  dynamic "pod_identity_association" {
    for_each = contains(keys(local.identities), each.value) ? [local.identities[each.value].account] : []
    content {
      role_arn        = aws_iam_role.addon[each.value].arn
      service_account = pod_identity_association.value
    }
  }

  depends_on = [aws_eks_node_group.node, aws_iam_role_policy_attachment.addon]
}

resource "aws_fsx_lustre_file_system" "lustre" {
  for_each                    = var.lustre
  storage_capacity            = each.value.size_gib
  subnet_ids                  = [aws_subnet.private[each.value.zone].id]
  deployment_type             = "PERSISTENT_2"
  per_unit_storage_throughput = 250
  security_group_ids          = [aws_eks_cluster.cluster.vpc_config[0].cluster_security_group_id]
  tags                        = { Name = "${var.name}-${each.key}" }
}

resource "aws_efs_file_system" "efs" {
  for_each        = var.efs
  encrypted       = true
  throughput_mode = "elastic"
  tags            = { Name = "${var.name}-${each.key}" }
}

resource "aws_efs_mount_target" "efs" {
  for_each        = { for pair in setproduct(var.efs, var.zones) : join("-", pair) => pair }
  file_system_id  = aws_efs_file_system.efs[each.value[0]].id
  subnet_id       = aws_subnet.private[each.value[1]].id
  security_groups = [aws_eks_cluster.cluster.vpc_config[0].cluster_security_group_id]
}

output "update_kubeconfig" {
  description = "Command that lets kubectl use the cluster."
  value       = "aws eks update-kubeconfig --region ${var.region} --name ${aws_eks_cluster.cluster.name}"
}

output "lustre" {
  description = "Identifier, DNS name and mount name of each FSx file system."
  value = {
    for name, system in aws_fsx_lustre_file_system.lustre :
    name => { id = system.id, dns_name = system.dns_name, mount_name = system.mount_name }
  }
}

output "efs" {
  description = "Identifier of each EFS file system."
  value       = { for name, system in aws_efs_file_system.efs : name => system.id }
}
