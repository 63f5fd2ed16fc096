"""The CloudFormation template of a stack: machines, queue, scheduling policy, roles and log group.

The properties equal the requests in `stack`, with references between the resources.
"""

from __future__ import annotations

import re
from typing import Any

from regauge.jobs.targets._aws_batch.container import DEFAULT_LOG_GROUP, find_batch_devices
from regauge.jobs.targets._aws_batch.stack import (
    StackPlan,
    build_compute_environment,
    build_job_queue,
    build_launch_template,
    build_scheduling_policy,
)

TEMPLATE_FILE = "batch-stack.json"
LOG_DAYS = 30
"""Days after which the log group deletes its events."""
MANAGED_POLICIES = "arn:${AWS::Partition}:iam::aws:policy/service-role/"
SECRET_ACTIONS = {"secretsmanager": "secretsmanager:GetSecretValue", "ssm": "ssm:GetParameters"}
Resources = dict[str, dict[str, Any]]


def build_template(plan: StackPlan, log_group: str) -> dict[str, Any]:
    """Return the CloudFormation template of a stack."""
    resources: Resources = {
        "LaunchTemplate": {
            "Type": "AWS::EC2::LaunchTemplate",
            "Properties": {
                "LaunchTemplateName": plan.stack.name,
                "LaunchTemplateData": build_launch_template(plan),
            },
        },
        **_build_roles(plan),
        "ComputeEnvironment": _build_environment(plan),
        "JobQueue": _build_queue(plan),
    }
    if plan.creates_placement_group:
        resources["PlacementGroup"] = {
            "Type": "AWS::EC2::PlacementGroup",
            "Properties": {"GroupName": plan.stack.name, "Strategy": "cluster"},
        }
    policy = build_scheduling_policy(plan)
    if policy is not None:
        properties = _capitalize_keys(policy)
        resources["SchedulingPolicy"] = _build_resource("SchedulingPolicy", properties)
    if log_group != DEFAULT_LOG_GROUP:
        resources["LogGroup"] = {
            "Type": "AWS::Logs::LogGroup",
            "DeletionPolicy": "Retain",
            "UpdateReplacePolicy": "Retain",
            "Properties": {"LogGroupName": log_group, "RetentionInDays": LOG_DAYS},
        }
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": f"AWS Batch queue and machines of {plan.stack.name}",
        "Metadata": {"AvailabilityZones": _describe_zones(plan)},
        "Resources": resources,
        "Outputs": {
            "JobQueue": {"Value": {"Ref": "JobQueue"}},
            "JobRole": {"Value": {"Fn::GetAtt": ["JobRole", "Arn"]}},
            "ExecutionRole": {"Value": {"Fn::GetAtt": ["ExecutionRole", "Arn"]}},
        },
    }


def _describe_zones(plan: StackPlan) -> dict[str, Any]:
    """Return the zones of the subnets and of the reservation, for checks of the template."""
    reservation = plan.stack.capacity_reservation
    zones: dict[str, Any] = {"Subnets": dict(plan.stack.subnets)}
    return zones if reservation is None else zones | {"CapacityReservation": reservation.zone}


def _build_resource(kind: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {"Type": f"AWS::Batch::{kind}", "Properties": properties}


def _build_environment(plan: StackPlan) -> dict[str, Any]:
    properties = _capitalize_keys(build_compute_environment(plan))
    resources = properties["ComputeResources"]
    resources["InstanceRole"] = {"Fn::GetAtt": ["InstanceProfile", "Arn"]}
    resources["LaunchTemplate"] = {
        "LaunchTemplateId": {"Ref": "LaunchTemplate"},
        "Version": {"Fn::GetAtt": ["LaunchTemplate", "LatestVersionNumber"]},
    }
    if plan.creates_placement_group:
        resources["PlacementGroup"] = {"Ref": "PlacementGroup"}
    parameter = find_batch_devices(plan.machine.vendor).image_parameter
    if parameter and plan.stack.image_id is None:
        image = f"{{{{resolve:ssm:{parameter}}}}}"
        resources["Ec2Configuration"][0]["ImageIdOverride"] = image
    properties["ReplaceComputeEnvironment"] = False
    return _build_resource("ComputeEnvironment", properties)


def _build_queue(plan: StackPlan) -> dict[str, Any]:
    properties = _capitalize_keys(build_job_queue(plan))
    properties["ComputeEnvironmentOrder"][0]["ComputeEnvironment"] = {"Ref": "ComputeEnvironment"}
    if "SchedulingPolicyArn" in properties:
        properties["SchedulingPolicyArn"] = {"Ref": "SchedulingPolicy"}
    return _build_resource("JobQueue", properties)


def _build_roles(plan: StackPlan) -> Resources:
    """Return the roles of the machines, of the ECS agent that starts containers, and of jobs."""
    execution = _build_role("ecs-tasks", "AmazonECSTaskExecutionRolePolicy")
    statements = [
        {"Effect": "Allow", "Action": action, "Resource": arns}
        for service, action in SECRET_ACTIONS.items()
        if (arns := sorted(set(_list_arns(plan, service))))
    ]
    if statements:
        policy = {"Version": "2012-10-17", "Statement": statements}
        execution["Properties"]["Policies"] = [
            {"PolicyName": "secrets", "PolicyDocument": policy},
        ]
    instance = _build_role("ec2", "AmazonEC2ContainerServiceforEC2Role")
    instance["Properties"]["RoleName"] = plan.instance_role
    profile = {"InstanceProfileName": plan.instance_role, "Roles": [{"Ref": "InstanceRole"}]}
    return {
        "InstanceRole": instance,
        "InstanceProfile": {"Type": "AWS::IAM::InstanceProfile", "Properties": profile},
        "ExecutionRole": execution,
        "JobRole": _build_role("ecs-tasks"),
    }


def _list_arns(plan: StackPlan, service: str) -> list[str]:
    """Return the ARNs of the secrets of a service; other references are no part of a policy."""
    pattern = re.compile(rf"arn:aws[-a-z]*:{service}:")
    return [value for value in plan.job.secrets.values() if pattern.match(value)]


def _build_role(service: str, *policies: str) -> dict[str, Any]:
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": f"{service}.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    document = {"Version": "2012-10-17", "Statement": [statement]}
    properties: dict[str, Any] = {"AssumeRolePolicyDocument": document}
    if policies:
        properties["ManagedPolicyArns"] = [
            {"Fn::Sub": f"{MANAGED_POLICIES}{policy}"} for policy in policies
        ]
    return {"Type": "AWS::IAM::Role", "Properties": properties}


def _capitalize_keys(value: Any) -> Any:
    """Return a request with the names of CloudFormation's properties; tags stay unchanged."""
    if isinstance(value, list):
        return [_capitalize_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key[0].upper() + key[1:]: item if key == "tags" else _capitalize_keys(item)
        for key, item in value.items()
    }
